// Groups of threads: the block, tiles of a warp, and the lanes that are together.
//
// Left out: barriers of the whole grid (blocks run one after another here), tiles of more than a warp,
// clusters, memcpy_async.
#pragma once

namespace cooperative_groups {
namespace emulated {
inline unsigned rank_in_block() {
    return threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z);
}
inline unsigned lane() { return rank_in_block() & 31; }
inline unsigned mask_of(unsigned first, unsigned size) {
    return size >= 32 ? 0xffffffffu : ((1u << size) - 1) << first;
}
EMULATOR_UNCOUNTED inline int lane_of(unsigned mask, unsigned rank) {
    while (rank-- > 0) mask &= mask - 1;
    return __builtin_ctz(mask);
}
template <class T>
constexpr bool never = false;
}  // namespace emulated

class thread_group {
   public:
    thread_group(unsigned mask, bool block) : mask_(mask), block_(block) {}
    void sync(EMULATOR_LINE) const {
        if (block_) __syncthreads(line);
        else __syncwarp(mask_, line);
    }
    unsigned size() const {
        return block_ ? blockDim.x * blockDim.y * blockDim.z
                      : static_cast<unsigned>(__builtin_popcount(mask_));
    }
    unsigned num_threads() const { return size(); }
    unsigned thread_rank() const {
        if (block_) return emulated::rank_in_block();
        return static_cast<unsigned>(__builtin_popcount(mask_ & ((1u << emulated::lane()) - 1)));
    }
    bool is_valid() const { return true; }
    unsigned lanes() const { return mask_; }

   protected:
    unsigned mask_;
    bool block_;
};

class thread_block : public thread_group {
   public:
    thread_block() : thread_group(0, true) {}
    static unsigned size() { return blockDim.x * blockDim.y * blockDim.z; }
    static unsigned num_threads() { return size(); }
    static unsigned thread_rank() { return emulated::rank_in_block(); }
    static dim3 group_index() { return blockIdx; }
    static dim3 thread_index() { return threadIdx; }
    static dim3 group_dim() { return blockDim; }
    static dim3 dim_threads() { return blockDim; }
};
inline thread_block this_thread_block() { return {}; }

// Lanes of one warp, which pass values by their rank within the group.
class warp_group : public thread_group {
   public:
    explicit warp_group(unsigned mask) : thread_group(mask, false) {}
    template <class T>
    T shfl(T value, int rank, EMULATOR_LINE) const {
        return __shfl_sync(mask_, value, lane_of(static_cast<unsigned>(rank) % size()), 32, line);
    }
    template <class T>
    T shfl_up(T value, unsigned delta, EMULATOR_LINE) const {
        unsigned rank = thread_rank();
        return __shfl_sync(mask_, value, lane_of(rank < delta ? rank : rank - delta), 32, line);
    }
    template <class T>
    T shfl_down(T value, unsigned delta, EMULATOR_LINE) const {
        unsigned rank = thread_rank();
        return __shfl_sync(mask_, value, lane_of(rank + delta < size() ? rank + delta : rank), 32, line);
    }
    template <class T>
    T shfl_xor(T value, unsigned lanes, EMULATOR_LINE) const {
        unsigned rank = thread_rank(), other = rank ^ lanes;
        return __shfl_sync(mask_, value, lane_of(other < size() ? other : rank), 32, line);
    }
    int any(int predicate, EMULATOR_LINE) const { return __any_sync(mask_, predicate, line); }
    int all(int predicate, EMULATOR_LINE) const { return __all_sync(mask_, predicate, line); }
    unsigned ballot(int predicate, EMULATOR_LINE) const {
        unsigned votes = __ballot_sync(mask_, predicate, line), packed = 0;
        for (unsigned rank = 0; rank < size(); rank++)
            packed |= (votes >> lane_of(rank) & 1u) << rank;
        return packed;
    }
    template <class T>
    unsigned match_any(T value, EMULATOR_LINE) const { return __match_any_sync(mask_, value, line); }

   private:
    int lane_of(unsigned rank) const { return emulated::lane_of(mask_, rank); }
};

template <unsigned Size, class Parent = void>
class thread_block_tile : public warp_group {
    static_assert(Size <= 32, "the emulator does not have tiles of more than 32 threads");

   public:
    thread_block_tile()
        : warp_group(emulated::mask_of(emulated::lane() / Size * Size, Size)) {}
    template <class Other>
    thread_block_tile(const thread_block_tile<Size, Other>&) : thread_block_tile() {}
    static constexpr unsigned size() { return Size; }
    static constexpr unsigned num_threads() { return Size; }
    unsigned thread_rank() const { return emulated::lane() % Size; }
    unsigned meta_group_rank() const { return emulated::rank_in_block() / Size; }
    unsigned meta_group_size() const { return (thread_block::size() + Size - 1) / Size; }
};

class coalesced_group : public warp_group {
   public:
    explicit coalesced_group(unsigned mask) : warp_group(mask) {}
};
inline coalesced_group coalesced_threads(EMULATOR_LINE) { return coalesced_group(__activemask(line)); }

// The lanes of a group that have the same label.
template <class Label>
coalesced_group labeled_partition(const thread_group& group, Label label, EMULATOR_LINE) {
    return coalesced_group(__match_any_sync(group.lanes(), label, line));
}
inline coalesced_group binary_partition(const thread_group& group, bool label, EMULATOR_LINE) {
    return labeled_partition(group, label, line);
}

template <unsigned Size, class Parent>
thread_block_tile<Size, Parent> tiled_partition(const Parent&) { return {}; }
inline warp_group tiled_partition(const thread_group& parent, unsigned size) {
    unsigned first = emulated::lane_of(parent.lanes() ? parent.lanes() : ~0u,
                                       (parent.lanes() ? parent.thread_rank() : emulated::lane()) /
                                           size * size);
    return warp_group(emulated::mask_of(first, size));
}

class grid_group {
   public:
    template <class T = void>
    void sync() const {
        static_assert(emulated::never<T>,
                      "the emulator does not have barriers of the whole grid: its blocks run one "
                      "after another");
    }
    static unsigned long long size() {
        return static_cast<unsigned long long>(gridDim.x) * gridDim.y * gridDim.z * thread_block::size();
    }
    static unsigned long long num_threads() { return size(); }
    static unsigned long long thread_rank() {
        return (blockIdx.x + static_cast<unsigned long long>(gridDim.x) *
                                 (blockIdx.y + static_cast<unsigned long long>(gridDim.y) * blockIdx.z)) *
                   thread_block::size() +
               emulated::rank_in_block();
    }
    static dim3 group_dim() { return gridDim; }
    static bool is_valid() { return true; }
};
inline grid_group this_grid() { return {}; }

template <class Group>
void sync(const Group& group, EMULATOR_LINE) { group.sync(line); }

template <class T> struct plus { T operator()(T a, T b) const { return a + b; } };
template <class T> struct less { T operator()(T a, T b) const { return b < a ? b : a; } };
template <class T> struct greater { T operator()(T a, T b) const { return a < b ? b : a; } };
template <class T> struct bit_and { T operator()(T a, T b) const { return a & b; } };
template <class T> struct bit_or { T operator()(T a, T b) const { return a | b; } };
template <class T> struct bit_xor { T operator()(T a, T b) const { return a ^ b; } };

// All lanes get the result, combined in a tree as a GPU does.
template <class Group, class T, class Operation>
T reduce(const Group& group, T value, Operation operation, EMULATOR_LINE) {
    unsigned size = group.size();
    if ((size & (size - 1)) == 0) {
        for (unsigned step = size / 2; step > 0; step /= 2)
            value = operation(value, group.shfl_xor(value, step, line));
        return value;
    }
    T result = group.shfl(value, 0, line);
    for (unsigned rank = 1; rank < size; rank++)
        result = operation(result, group.shfl(value, static_cast<int>(rank), line));
    return result;
}
template <class Group, class T, class Operation>
T inclusive_scan(const Group& group, T value, Operation operation, EMULATOR_LINE) {
    for (unsigned step = 1; step < group.size(); step *= 2) {
        T before = group.shfl_up(value, step, line);
        if (group.thread_rank() >= step) value = operation(before, value);
    }
    return value;
}
template <class Group, class T>
T inclusive_scan(const Group& group, T value, EMULATOR_LINE) {
    return inclusive_scan(group, value, plus<T>(), line);
}
template <class Group, class T, class Operation>
T exclusive_scan(const Group& group, T value, Operation operation, EMULATOR_LINE) {
    T before = group.shfl_up(inclusive_scan(group, value, operation, line), 1, line);
    return group.thread_rank() ? before : T();
}
template <class Group, class T>
T exclusive_scan(const Group& group, T value, EMULATOR_LINE) {
    return exclusive_scan(group, value, plus<T>(), line);
}
}  // namespace cooperative_groups
