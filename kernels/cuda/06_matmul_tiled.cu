/* Matrix multiplication, tiled: a block fetches each number once and shares it.

The threads of a block compute a square tile of C, and between them fetch every row of A
and column of B TILE times. So they work together: each fetches one element of a tile of
A and one of B into shared memory, which lies on the chip; all wait; then each
multiplies out of shared memory, where every element is used TILE times.

Two barriers a step. Without the first, a thread may read an element that its owner has
not written yet; without the second, a fast thread may overwrite the tile while a slow
one still reads it. No thread may leave early, even one that has no element of C: the
barriers need all of them, and so it fetches zeros.

Launch:   grid (ceil(N / TILE), ceil(M / TILE)), block (TILE, TILE).
Counts:   2 M N K / TILE loads from global memory, in 4 sectors a request, all of it
          used; the 2 M N K loads are now from shared memory.
Improves: on 05 in global loads: TILE times fewer.
Read:     the playbook, "Tiling"; CUDA C++ Programming Guide, "Shared Memory".
*/
#ifndef TILE
#define TILE 16
#endif

extern "C" __global__ void matmul_tiled(
    const float* a, const float* b, float* c, int M, int N, int K) {
    __shared__ float a_tile[TILE][TILE];
    __shared__ float b_tile[TILE][TILE];
    const int tx = threadIdx.x;
    const int ty = threadIdx.y;
    const int row = blockIdx.y * TILE + ty;
    const int col = blockIdx.x * TILE + tx;

    float sum = 0.0f;
    for (int k0 = 0; k0 < K; k0 += TILE) {
        a_tile[ty][tx] = row < M && k0 + tx < K ? a[(size_t)row * K + k0 + tx] : 0.0f;
        b_tile[ty][tx] = k0 + ty < K && col < N ? b[(size_t)(k0 + ty) * N + col] : 0.0f;
        __syncthreads();  // all have written before anyone reads
        for (int k = 0; k < TILE; ++k) {
            sum += a_tile[ty][k] * b_tile[k][tx];
        }
        __syncthreads();  // all have read before anyone overwrites
    }
    if (row < M && col < N) {
        c[(size_t)row * N + col] = sum;
    }
}
