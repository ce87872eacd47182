/* Matrix multiplication, thread-coarsened: one thread, COARSEN x COARSEN elements of C.

In the tiled kernel each multiplication reads two numbers from shared memory, and the
queue in front of shared memory becomes the limit. If a thread computes 4 x 4 elements,
it reads 4 numbers of A and 4 of B into registers and multiplies each with each: 16
multiplications for 8 reads instead of 32. The same number of threads now covers a tile
COARSEN times as wide and as high, so that global loads fall as well.

A thread's elements lie TILE apart, not side by side: in every single access
neighbouring threads still touch neighbouring addresses, which keeps global requests
coalesced and shared ones free of conflicts. For the same reason the threads, numbered
from 0 to TILE^2 - 1, bring the tiles in the order in which they lie in memory.

Launch:   grid (ceil(N / SIDE), ceil(M / SIDE)), block (TILE, TILE), with
          SIDE = TILE * COARSEN.
Counts:   2 M N K / COARSEN shared loads; 2 M N K / (TILE * COARSEN) global loads.
Improves: on 06 in both, COARSEN times. It costs registers: COARSEN^2 sums a thread.
Read:     the playbook, "Thread coarsening"; Hwu, Kirk, El Hajj, "Programming Massively
          Parallel Processors", 4th edition, section 6.3.
*/
#ifndef TILE
#define TILE 16
#endif
#ifndef COARSEN
#define COARSEN 4
#endif
#define SIDE (TILE * COARSEN)  // of the block's tile of C

extern "C" __global__ void matmul_coarsened(
    const float* a, const float* b, float* c, int M, int N, int K) {
    __shared__ float a_tile[SIDE][TILE];
    __shared__ float b_tile[TILE][SIDE];
    const int tx = threadIdx.x;
    const int ty = threadIdx.y;
    const int row0 = blockIdx.y * SIDE;
    const int col0 = blockIdx.x * SIDE;

    float sum[COARSEN][COARSEN] = {};
    for (int k0 = 0; k0 < K; k0 += TILE) {
        for (int i = ty * TILE + tx; i < SIDE * TILE; i += TILE * TILE) {
            const int row = row0 + i / TILE;
            const int a_k = k0 + i % TILE;
            const int b_k = k0 + i / SIDE;
            const int col = col0 + i % SIDE;
            a_tile[i / TILE][i % TILE] =
                row < M && a_k < K ? a[(size_t)row * K + a_k] : 0.0f;
            b_tile[i / SIDE][i % SIDE] =
                b_k < K && col < N ? b[(size_t)b_k * N + col] : 0.0f;
        }
        __syncthreads();
        for (int k = 0; k < TILE; ++k) {
            float a_regs[COARSEN];
            float b_regs[COARSEN];
            for (int i = 0; i < COARSEN; ++i) {
                a_regs[i] = a_tile[ty + i * TILE][k];
                b_regs[i] = b_tile[k][tx + i * TILE];
            }
            for (int i = 0; i < COARSEN; ++i) {
                for (int j = 0; j < COARSEN; ++j) {
                    sum[i][j] += a_regs[i] * b_regs[j];
                }
            }
        }
        __syncthreads();
    }
    for (int i = 0; i < COARSEN; ++i) {
        for (int j = 0; j < COARSEN; ++j) {
            const int row = row0 + ty + i * TILE;
            const int col = col0 + tx + j * TILE;
            if (row < M && col < N) {
                c[(size_t)row * N + col] = sum[i][j];
            }
        }
    }
}
