/* Softmax of every row, in three passes and in two.

y = e^(x - m) / s, with m the row's maximum and s the row's sum of e^(x - m).
Subtracting m changes nothing on paper and keeps e^x from overflowing, which in float32
it does beyond x = 88. But m is only known at the end of the row, and s needs m: hence
the passes.

softmax_three_pass  maximum; sum; write. The row is read three times.
softmax_online      keeps a running maximum and a running sum, and when a larger element
                    turns up, multiplies the sum by e^(old maximum - new maximum), which
                    corrects all its terms at once. Maximum and sum come out of one
                    pass; the row is read twice. The same correction is what lets
                    FlashAttention work through a row of scores in pieces.

A block takes a row: its threads stride through the columns, then combine their results
by warp shuffles. An element of -inf gets 0; a row of nothing else gives nan, as in
PyTorch.

Launch:   grid rows, block a multiple of 32, such as 128.
Counts:   3 loads an element, then 2; 1 store.
Improves: on one kernel an operation, which also writes and reads x - m and e^(x - m).
Read:     Milakov and Gimelshein 2018 (arXiv:1805.02867), algorithms 2 and 3.
*/
#define FULL_WARP 0xffffffffu

// The block's maximum (or sum), for every thread. `slots`: 32 floats of shared memory.
static __device__ float block_max(float v, float* slots) {
    for (int distance = 16; distance > 0; distance /= 2) {
        v = fmaxf(v, __shfl_xor_sync(FULL_WARP, v, distance));
    }
    if (threadIdx.x % 32 == 0) {
        slots[threadIdx.x / 32] = v;
    }
    __syncthreads();
    v = slots[0];
    for (int warp = 1; warp < blockDim.x / 32; ++warp) {
        v = fmaxf(v, slots[warp]);
    }
    __syncthreads();  // slots may be used again
    return v;
}

static __device__ float block_sum(float v, float* slots) {
    for (int distance = 16; distance > 0; distance /= 2) {
        v += __shfl_xor_sync(FULL_WARP, v, distance);
    }
    if (threadIdx.x % 32 == 0) {
        slots[threadIdx.x / 32] = v;
    }
    __syncthreads();
    v = slots[0];
    for (int warp = 1; warp < blockDim.x / 32; ++warp) {
        v += slots[warp];
    }
    __syncthreads();
    return v;
}

extern "C" __global__ void softmax_three_pass(
    const float* x, float* y, int rows, int cols) {
    __shared__ float slots[32];
    if (blockIdx.x >= rows) return;  // the whole block: no barrier waits for it
    x += (size_t)blockIdx.x * cols;
    y += (size_t)blockIdx.x * cols;

    float row_max = -INFINITY;
    for (int i = threadIdx.x; i < cols; i += blockDim.x) {
        row_max = fmaxf(row_max, x[i]);
    }
    row_max = block_max(row_max, slots);

    float sum = 0.0f;
    for (int i = threadIdx.x; i < cols; i += blockDim.x) {
        sum += expf(x[i] - row_max);
    }
    sum = block_sum(sum, slots);

    for (int i = threadIdx.x; i < cols; i += blockDim.x) {
        y[i] = expf(x[i] - row_max) / sum;
    }
}

extern "C" __global__ void softmax_online(
    const float* x, float* y, int rows, int cols) {
    __shared__ float slots[32];
    if (blockIdx.x >= rows) return;
    x += (size_t)blockIdx.x * cols;
    y += (size_t)blockIdx.x * cols;

    float my_max = -INFINITY;  // of the elements this thread has seen
    float my_sum = 0.0f;       // of e^(element - my_max)
    for (int i = threadIdx.x; i < cols; i += blockDim.x) {
        const float v = x[i];
        if (v > my_max) {
            my_sum *= expf(my_max - v);
            my_max = v;
        }
        // e^(-inf) is 0, but with -inf as the maximum too, -inf + inf would be nan.
        my_sum += v == -INFINITY ? 0.0f : expf(v - my_max);
    }
    const float row_max = block_max(my_max, slots);
    my_sum *= my_max == -INFINITY ? 0.0f : expf(my_max - row_max);
    const float sum = block_sum(my_sum, slots);

    for (int i = threadIdx.x; i < cols; i += blockDim.x) {
        y[i] = expf(x[i] - row_max) / sum;
    }
}
