// SPDX-License-Identifier: LGPL-3.0-or-later
// The exported trainer in a process without Python; the plugin by dlopen. Each
// test runs in its own process (ctest starts them one by one), so that those
// that fork have no threads yet.
#include <dlfcn.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <torch/csrc/jit/passes/inliner.h>
#include <torch/script.h>
#include <unistd.h>

#include <cstdlib>
#include <fstream>
#include <sstream>
#include <string>
#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>
#include <vector>

#include "store_backend.h"

namespace {

constexpr int kSteps = 6;
constexpr double kRate = 0.05;
constexpr int64_t kBatchBytes = 8 * (2 * 4 * 3 + 2 + 2 * 4 * 3);
const std::string kFolder = DEEPMD_PREWARM_TRAINER;

void load_plugin() {
  ASSERT_EQ(dlsym(RTLD_DEFAULT, "Py_IsInitialized"), nullptr)
      << "this process is to be one without Python";
  ASSERT_NE(dlopen(DEEPMD_PREWARM_LIBRARY, RTLD_NOW | RTLD_GLOBAL), nullptr)
      << dlerror();
}

// Losses of one rank in a Python run without the plugin.
std::vector<double> losses_in_python(int world, int rank) {
  std::ifstream file(kFolder + "/losses.txt");
  std::string line;
  while (std::getline(file, line)) {
    std::istringstream words(line);
    int line_world = 0;
    int line_rank = 0;
    words >> line_world >> line_rank;
    std::vector<double> losses;
    for (std::string word; words >> word;) {
      losses.push_back(std::strtod(word.c_str(), nullptr));
    }
    if (line_world == world && line_rank == rank) {
      return losses;
    }
  }
  return {};
}

c10::List<at::Tensor> batch(const std::string& task, int rank) {
  const auto batches = torch::jit::load(kFolder + "/batches.pt");
  c10::List<at::Tensor> parts;
  for (int part = 0; part < 3; ++part) {
    parts.push_back(batches
                        .attr(task + "_" + std::to_string(rank) + "_" +
                              std::to_string(part))
                        .toTensor());
  }
  return parts;
}

struct Run {
  int64_t released;
  std::vector<double> losses;
  std::vector<size_t> columns;
};

Run train(torch::jit::Module& trainer,
          int rank,
          int world,
          const std::string& group) {
  const auto result = trainer.get_method("train_prepared")(
      {batch("water", rank), batch("metal", rank), kSteps, kRate, group,
       world});
  Run run{result.toTupleRef().elements().at(0).toInt(), {}, {}};
  for (const c10::IValue& row : result.toTupleRef().elements().at(1).toList()) {
    const auto log = row.toGenericDict();
    run.columns.push_back(log.size());
    run.losses.push_back(log.begin()->value().toDouble());
  }
  return run;
}

std::vector<std::string> told(const torch::jit::Module& trainer) {
  std::vector<std::string> words;
  for (const c10::IValue& word : trainer.get_method("told")({}).toList()) {
    words.push_back(word.toStringRef());
  }
  return words;
}

// One rank of two: 0 if its losses are those of Python.
int run_rank(int rank, uint16_t port) {
  c10d::TCPStoreOptions options;
  options.port = port;
  options.isServer = rank == 0;
  options.numWorkers = 2;
  const c10::intrusive_ptr<c10d::Store> store =
      c10::make_intrusive<c10d::TCPStore>("127.0.0.1", options);
  const auto group = c10::make_intrusive<c10d::ProcessGroup>(store, rank, 2);
  group->setBackend(c10::DeviceType::CPU,
                    c10d::ProcessGroup::BackendType::CUSTOM,
                    c10::make_intrusive<StoreBackend>(store, rank, 2));
  group->setDefaultBackend(c10d::ProcessGroup::BackendType::CUSTOM);
  c10d::register_process_group("trainers", group);
  auto trainer = torch::jit::load(kFolder + "/trainer.pt");
  const auto run = train(trainer, rank, 2, "trainers");
  EXPECT_EQ(run.released, 2 * kBatchBytes);
  EXPECT_EQ(run.losses, losses_in_python(2, rank));
  // The server leaves last: the other rank's farewell still needs it.
  if (rank == 0) {
    store->get("left");
  } else {
    store->set("left", "1");
  }
  return testing::Test::HasFailure() ? 1 : 0;
}

// A port that nobody listens on.
uint16_t free_port() {
  const c10d::TCPStore probe("127.0.0.1", [] {
    c10d::TCPStoreOptions options;
    options.port = 0;
    options.isServer = true;
    options.waitWorkers = false;
    return options;
  }());
  return probe.getPort();
}

}  // namespace

TEST(ExportedTrainer, HasTheLossesOfPythonToTheLastBit) {
  load_plugin();
  auto trainer = torch::jit::load(kFolder + "/trainer.pt");
  EXPECT_EQ(told(trainer),
            (std::vector<std::string>{"water torchscript", "cold", "cold",
                                      "cold", "0 0"}));
  const auto run = train(trainer, 0, 1, "");
  const auto expected = losses_in_python(1, 0);
  ASSERT_EQ(expected.size(), kSteps);
  EXPECT_EQ(run.losses, expected);
  EXPECT_LT(run.losses.back(), run.losses.at(1));
  // The l2_ column is left out, the step is a number.
  EXPECT_EQ(run.columns, std::vector<size_t>(kSteps, 2));
}

TEST(ExportedTrainer, WarmsTheModulesItWasSavedWithAndLeavesNoTrace) {
  load_plugin();
  auto trainer = torch::jit::load(kFolder + "/trainer.pt");
  EXPECT_EQ(train(trainer, 0, 1, "").released, 2 * kBatchBytes);
  // Three training steps a task and no trace of the warm-up run; the handle
  // that was saved twice is still one.
  EXPECT_EQ(told(trainer),
            (std::vector<std::string>{"water torchscript", "warm", "warm",
                                      "warm", "3 3"}));
}

TEST(ExportedTrainer, SavedAgainFromCppTrainsTheSame) {
  load_plugin();
  std::stringstream file;
  torch::jit::load(kFolder + "/trainer.pt").save(file);
  auto trainer = torch::jit::load(file);
  EXPECT_EQ(train(trainer, 0, 1, "").losses, losses_in_python(1, 0));
  EXPECT_EQ(told(trainer).at(2), "warm");
}

TEST(ExportedTrainer, FrozenTrainsTheSame) {
  load_plugin();
  auto trainer = torch::jit::load(kFolder + "/frozen.pt");
  const auto run = train(trainer, 0, 1, "");
  EXPECT_EQ(run.released, 2 * kBatchBytes);
  EXPECT_EQ(run.losses, losses_in_python(1, 0));
  EXPECT_EQ(told(trainer).at(3), "warm");
}

TEST(ExportedTrainer, TrainsInTwoProcessesOverAGroupMadeInCpp) {
  const auto port = [] {
    // In a child, so that this process stays without threads.
    int pipes[2];
    EXPECT_EQ(pipe(pipes), 0);
    const auto child = fork();
    if (child == 0) {
      const auto found = free_port();
      _exit(write(pipes[1], &found, sizeof(found)) == sizeof(found) ? 0 : 1);
    }
    uint16_t found = 0;
    EXPECT_EQ(read(pipes[0], &found, sizeof(found)), sizeof(found));
    waitpid(child, nullptr, 0);
    return found;
  }();
  const auto child = fork();
  if (child == 0) {
    load_plugin();
    const int status = run_rank(1, port);
    std::exit(status);  // with destructors: what leaves must not hang
  }
  load_plugin();
  EXPECT_EQ(run_rank(0, port), 0);
  int status = -1;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << status;
}

TEST(TracedModule, RunsTheOperatorsItCalls) {
  load_plugin();
  auto module = torch::jit::load(kFolder + "/traced.pt");
  auto graph = module.get_method("forward").graph()->copy();
  torch::jit::Inline(*graph);
  int calls = 0;
  for (const auto* node : graph->nodes()) {
    const std::string kind = node->kind().toQualString();
    calls += kind == "deepmd::release_trace_inputs" ||
             kind == "deepmd::safe_empty_cache";
  }
  EXPECT_EQ(calls, 2);
  const auto result = module.forward({torch::ones({4, 4})}).toTensor();
  EXPECT_EQ(result.sum().item<double>(), 64);
}

TEST(ExportedTrainer, IsAnErrorThatNamesTheOperatorWithoutThePlugin) {
  try {
    torch::jit::load(kFolder + "/trainer.pt");
    FAIL() << "loaded without the plugin";
  } catch (const std::exception& error) {
    EXPECT_NE(std::string(error.what()).find("deepmd"), std::string::npos)
        << error.what();
  }
}
