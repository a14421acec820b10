// SPDX-License-Identifier: LGPL-3.0-or-later
// Who else holds these tensors and their storages? The answer decides, tensor
// by tensor, whether memory may be given back while the process lives on.
//
// It rests on reference counts. A tensor (TensorImpl) that is in the list may
// be held by: the list, its Python object, views of it that are in the list
// too, and nothing else; a storage only by tensors for which that is true.
// Whatever more there is belongs to somebody who will read the memory again.
#pragma once

#include <ATen/core/Tensor.h>
#include <deepmd_prewarm/plugin/export.h>

#include <cstddef>
#include <cstdint>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

namespace deepmd_prewarm {

/// What the audit found for one tensor. Everything but kRelease is kept.
enum class Verdict : uint8_t {
  kRelease,
  // Nothing there to give back.
  kNone,
  kReleased,
  kEmpty,
  kMeta,
  kFunctional,
  kFunctorch,
  kSubclass,
  kSparse,
  kNested,
  kOpaque,
  // Memory that is not the tensor's own.
  kBorrowed,
  kCopyOnWrite,
  // Not now.
  kCapturing,
  // Somebody else will read it.
  kAccumulator,
  kHeld,
  kUncertain,
  kStorageShared,
  kStorageObject,
  kCompanion,
};

/// "release", or the reason why a tensor is kept, in words for a user.
DEEPMD_PREWARM_API const char* describe(Verdict verdict);

/// One look at a list of tensors. add() each element, then decide(), then ask.
/// Not thread-safe; the audit itself holds one reference to each tensor.
class DEEPMD_PREWARM_API StorageAudit {
 public:
  /// `expected`: about how many elements will be added.
  explicit StorageAudit(size_t expected = 8);

  /// One element of the list; undefined tensors and repetitions are fine.
  void add(const at::Tensor& element);

  /// Judges all tensors added so far.
  void decide();

  /// For each add() its verdict, in order. Valid after decide().
  Verdict verdict(size_t element) const;
  size_t size() const { return elements_.size(); }

  /// Frees each storage with the verdict kRelease once; every later access
  /// raises a RuntimeError with `message`. Returns the bytes given back.
  /// A storage for which another thread made a view since decide() is made
  /// unreadable but not freed, so that no reader meets unmapped memory.
  size_t release(const std::string& message);

 private:
  struct Node {
    at::Tensor tensor;
    int64_t list_references = 0;
    int64_t view_references = 0;  // as the base of a view that is here too
    size_t storage = kNoStorage;
    Verdict verdict = Verdict::kRelease;
  };
  struct Storage {
    c10::StorageImpl* impl;
    int64_t members = 0;  // tensors of this audit that live in it
    int64_t expected_references = 0;
    Verdict verdict = Verdict::kRelease;
  };
  static constexpr size_t kNoStorage = SIZE_MAX;

  // Positions of pointers, in order of first appearance. Lists of inputs are
  // short: a scan beats hashing for the first kScanned of them.
  class Positions {
   public:
    explicit Positions(size_t expected);
    // The position of `key`, and whether it is new.
    std::pair<size_t, bool> find_or_add(const void* key);

   private:
    static constexpr size_t kScanned = 16;
    std::vector<const void*> first_;
    std::unordered_map<const void*, size_t> others_;
  };

  size_t node_of(const at::Tensor& tensor);
  void follow_views();
  void place_in_storage(Node& node);
  int64_t unexplained_references(const Node& node) const;
  int64_t caller_handles() const;
  void judge_holders();
  void judge_storages();

  std::vector<Node> nodes_;
  std::vector<Storage> storages_;
  std::vector<size_t> elements_;  // index into nodes_, kNoStorage for None
  Positions node_positions_;
  Positions storage_positions_;
};

}  // namespace deepmd_prewarm
