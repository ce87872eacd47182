/* Reduction: many numbers, one sum.

Threads can only add in parallel what does not depend on each other, so a sum is made as
a tree: pairs, pairs of pairs, and so on. Three ways, each better than the one above:

sum_atomic   every thread adds its element to one total in global memory. atomicAdd
             makes that correct, by making the threads take turns: n of them.
sum_shared   a block's threads add up their shares in registers, put them into shared
             memory, and halve the number of live values until one is left. A barrier
             between steps.
sum_shuffle  as above, but a warp halves its 32 values in registers: __shfl_down_sync
             reads the register of a lane further up. Only one value a warp goes through
             shared memory, and one barrier is left.

The last two leave one partial sum a block in `out`; a second launch with one block adds
those up (x = the partial sums, n = their number). No atomics, so that the order of
additions, and hence the rounding, is the same on every run.

Launch:   sum_atomic: grid ceil(n / block), out one zero. sum_shared: any grid and
          block. sum_shuffle: any grid, block a multiple of 32. Few large blocks: each
          thread strides through the array.
Counts:   n loads. Additions to global memory: n, then none. Shared loads in a block of
          B threads: 2 B - 1, then B / 32.
Read:     Mark Harris, "Optimizing Parallel Reduction in CUDA"; CUDA C++ Programming
          Guide, "Warp Shuffle Functions".
*/
#define FULL_WARP 0xffffffffu

extern "C" __global__ void sum_atomic(const float* x, float* out, int n) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) {
        atomicAdd(out, x[i]);
    }
}

#ifndef MAX_BLOCK
#define MAX_BLOCK 1024
#endif

// Elements one grid apart, so that a warp always reads 32 neighbours.
static __device__ float sum_of_share(const float* x, int n) {
    float sum = 0.0f;
    const size_t step = gridDim.x * blockDim.x;
    for (size_t i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += step) {
        sum += x[i];
    }
    return sum;
}

extern "C" __global__ void sum_shared(const float* x, float* out, int n) {
    __shared__ float values[MAX_BLOCK];
    const int t = threadIdx.x;
    values[t] = sum_of_share(x, n);
    __syncthreads();
    int live = blockDim.x;
    while (live > 1) {
        const int half = (live + 1) / 2;  // if live is odd, the middle one waits
        if (t + half < live) {
            values[t] += values[t + half];
        }
        live = half;
        __syncthreads();
    }
    if (t == 0) {
        out[blockIdx.x] = values[0];
    }
}

extern "C" __global__ void sum_shuffle(const float* x, float* out, int n) {
    __shared__ float warp_sums[32];
    const int lane = threadIdx.x % 32;
    const int warp = threadIdx.x / 32;
    const int num_warps = blockDim.x / 32;

    float sum = sum_of_share(x, n);
    for (int distance = 16; distance > 0; distance /= 2) {
        sum += __shfl_down_sync(FULL_WARP, sum, distance);
    }
    if (lane == 0) {
        warp_sums[warp] = sum;
    }
    __syncthreads();
    if (warp == 0) {
        sum = lane < num_warps ? warp_sums[lane] : 0.0f;
        for (int distance = 16; distance > 0; distance /= 2) {
            sum += __shfl_down_sync(FULL_WARP, sum, distance);
        }
        if (lane == 0) {
            out[blockIdx.x] = sum;
        }
    }
}
