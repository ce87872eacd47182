/* LayerNorm of every row, in three launches and fused into one.

y = (x - mean) / sqrt(variance + eps) * weight + bias. That is some 8 flops an element:
the time goes into carrying the row to and from memory.

layernorm_mean, layernorm_rstd, layernorm_apply
                 three launches, one a step, as separate array operations would do it:
                 each reads the whole of x again.
layernorm_fused  one launch. A thread keeps its elements in registers (ITEMS of them),
                 so that the mean, the variance and the result all come from one read.
                 Columns beyond ITEMS * block, if there are any, are read again: any
                 size works, and rows that fit are read once.

The variance is the mean of (x - mean)^2, in a second pass over the registers. The
shorter formula mean(x^2) - mean^2 subtracts two nearly equal numbers when the mean is
large, and can even come out negative.

Launch:   grid rows, block a multiple of 32, such as 256: then rows of up to 4096 fit.
Counts:   x: 3 loads an element unfused, 1 fused; weight and bias: 1 each; 1 store.
Read:     Ba et al. 2016 (arXiv:1607.06450), equation 4; the playbook, "Fused kernels".
*/
#define FULL_WARP 0xffffffffu
#ifndef ITEMS
#define ITEMS 16
#endif

// Sum over the block, for every thread. `slots`: 32 floats of shared memory.
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
    __syncthreads();  // slots may be used again
    return v;
}

extern "C" __global__ void layernorm_mean(
    const float* x, float* mean, int rows, int cols) {
    __shared__ float slots[32];
    if (blockIdx.x >= rows) return;  // the whole block: no barrier waits for it
    x += (size_t)blockIdx.x * cols;
    float sum = 0.0f;
    for (int i = threadIdx.x; i < cols; i += blockDim.x) {
        sum += x[i];
    }
    sum = block_sum(sum, slots);
    if (threadIdx.x == 0) {
        mean[blockIdx.x] = sum / cols;
    }
}

extern "C" __global__ void layernorm_rstd(
    const float* x, const float* mean, float* rstd, float eps, int rows, int cols) {
    __shared__ float slots[32];
    if (blockIdx.x >= rows) return;
    x += (size_t)blockIdx.x * cols;
    const float row_mean = mean[blockIdx.x];
    float sum = 0.0f;
    for (int i = threadIdx.x; i < cols; i += blockDim.x) {
        const float centred = x[i] - row_mean;
        sum += centred * centred;
    }
    sum = block_sum(sum, slots);
    if (threadIdx.x == 0) {
        rstd[blockIdx.x] = 1.0f / sqrtf(sum / cols + eps);
    }
}

extern "C" __global__ void layernorm_apply(
    const float* x, const float* mean, const float* rstd, const float* weight,
    const float* bias, float* y, int rows, int cols) {
    if (blockIdx.x >= rows) return;
    x += (size_t)blockIdx.x * cols;
    y += (size_t)blockIdx.x * cols;
    const float row_mean = mean[blockIdx.x];
    const float row_rstd = rstd[blockIdx.x];
    for (int i = threadIdx.x; i < cols; i += blockDim.x) {
        y[i] = (x[i] - row_mean) * row_rstd * weight[i] + bias[i];
    }
}

extern "C" __global__ void layernorm_fused(
    const float* x, const float* weight, const float* bias, float* y, float eps,
    int rows, int cols) {
    __shared__ float slots[32];
    if (blockIdx.x >= rows) return;
    x += (size_t)blockIdx.x * cols;
    y += (size_t)blockIdx.x * cols;
    const int beyond = ITEMS * blockDim.x + threadIdx.x;  // has no register

    float mine[ITEMS];
    float sum = 0.0f;
#pragma unroll
    for (int item = 0; item < ITEMS; ++item) {
        const int i = item * blockDim.x + threadIdx.x;
        mine[item] = i < cols ? x[i] : 0.0f;
        sum += mine[item];
    }
    for (int i = beyond; i < cols; i += blockDim.x) {
        sum += x[i];
    }
    const float mean = block_sum(sum, slots) / cols;

    float squares = 0.0f;
#pragma unroll
    for (int item = 0; item < ITEMS; ++item) {
        const int i = item * blockDim.x + threadIdx.x;
        const float centred = mine[item] - mean;
        squares += i < cols ? centred * centred : 0.0f;
    }
    for (int i = beyond; i < cols; i += blockDim.x) {
        squares += (x[i] - mean) * (x[i] - mean);
    }
    const float rstd = 1.0f / sqrtf(block_sum(squares, slots) / cols + eps);

#pragma unroll
    for (int item = 0; item < ITEMS; ++item) {
        const int i = item * blockDim.x + threadIdx.x;
        if (i < cols) {
            y[i] = (mine[item] - mean) * rstd * weight[i] + bias[i];
        }
    }
    for (int i = beyond; i < cols; i += blockDim.x) {
        y[i] = (x[i] - mean) * rstd * weight[i] + bias[i];
    }
}
