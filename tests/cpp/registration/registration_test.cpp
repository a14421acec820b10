// SPDX-License-Identifier: LGPL-3.0-or-later
#include <ATen/core/dispatch/Dispatcher.h>
#include <gtest/gtest.h>

#include <string>
#include <utility>
#include <vector>

extern "C" const char* deepmd_prewarm_load_error();

namespace {

using Name = std::pair<const char*, const char*>;

const std::vector<Name> kOperators{
    {"deepmd::release_trace_inputs", ""},
    {"deepmd::release_trace_inputs", "list"},
    {"deepmd::explain_release", ""},
    {"deepmd::warmup_compiled", ""},
    {"deepmd::warmup_compiled", "list"},
    {"deepmd::safe_empty_cache", ""},
    {"deepmd::cache_bytes", ""},
    {"deepmd::sync_ranks", ""},
    {"deepmd::scalarize_losses", ""},
};

c10::OperatorHandle handle_of(const Name& name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name.first,
                                                        name.second);
}

TEST(Registration, HasNothingToComplainOf) {
  EXPECT_STREQ(deepmd_prewarm_load_error(), "");
}

// TorchScript deletes a call whose result is unused if this is FROM_SCHEMA.
TEST(Registration, MakesEveryOperatorConservative) {
  for (const auto& name : kOperators) {
    EXPECT_EQ(handle_of(name).schema().aliasAnalysis(),
              c10::AliasAnalysisKind::CONSERVATIVE)
        << name.first << "." << name.second;
  }
}

// A catch-all kernel would run on FakeTensors and while tracing.
TEST(Registration, GivesEveryOperatorKernelsUnderExplicitKeys) {
  for (const auto& name : kOperators) {
    const auto handle = handle_of(name);
    EXPECT_TRUE(handle.hasSchema());
    EXPECT_FALSE(handle.hasKernelForDispatchKey(c10::DispatchKey::Undefined))
        << name.first;
    bool any = false;
    for (const auto key :
         {c10::DispatchKey::CPU, c10::DispatchKey::BackendSelect,
          c10::DispatchKey::CompositeExplicitAutograd}) {
      any = any || handle.hasKernelForDispatchKey(key);
    }
    EXPECT_TRUE(any) << name.first << "." << name.second;
    EXPECT_FALSE(handle.hasKernelForDispatchKey(
        c10::DispatchKey::CompositeImplicitAutograd))
        << name.first;
  }
}

// deepmd-kit takes this name as the sign that its own library is loaded.
TEST(Registration, NeverDefinesTheNameThatDeepmdKitLooksFor) {
  EXPECT_FALSE(c10::Dispatcher::singleton()
                   .findSchema({"deepmd::enable_mpi", ""})
                   .has_value());
}

TEST(Registration, ReturnsASymIntWhereTracersNeedOne) {
  for (const Name& name : {kOperators[0], kOperators[1]}) {
    const auto& returns = handle_of(name).schema().returns();
    ASSERT_EQ(returns.size(), 1U);
    EXPECT_EQ(returns[0].real_type()->kind(), c10::TypeKind::SymIntType);
  }
}

}  // namespace
