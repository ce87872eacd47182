/* Matrix multiplication, vectorised: four floats an instruction.

A thread may load 16 bytes at once (float4) if the address is a multiple of 16. The
bytes moved stay the same, but a quarter of the instructions asks for them. It works for
global memory and for shared memory, where a thread now owns 4 x 4 elements side by side
and reads 4 of A and 4 of B in one instruction each.

For that the 4 numbers of A, which belong to 4 rows, must lie side by side too: A's tile
is stored transposed, a_tile[k][row]. The price: the 4 threads that bring 4 x 4
neighbouring columns of one row write to the same memory bank (the tile's rows are 64
floats, a multiple of 32 banks), and wait for each other: a 4-way bank conflict. PAD
adds unused floats to a row to shift the banks; it must be a multiple of 4, or float4 is
no longer aligned, and so the best it can do here is 2-way. The next file removes the
conflict.

Any size: where rows are not a multiple of 16 bytes, or a tensor starts off the grid of
16, elements are loaded one by one.

Launch:   grid (ceil(N / SIDE), ceil(M / SIDE)), block (TILE, TILE), with SIDE = 4 TILE
          and TILE 8, 16 or 32.
Counts:   global load requests: 4 times fewer than 07 with COARSEN 4, 16 sectors each,
          all of it used. Shared loads: 4 times fewer, of 4 steps each. Sectors, bytes
          and steps stay the same: instructions are saved.
Improves: on 07 in requests, if K and N are multiples of 4. Pays with bank conflicts.
Read:     siboehm.com/articles/22/CUDA-MMM, kernel 6; CUDA C++ Programming Guide,
          "Device Memory Accesses", on size and alignment.
*/
#ifndef TILE
#define TILE 16
#endif
#ifndef PAD
#define PAD 0
#endif
#define SIDE (4 * TILE)  // of the block's tile of C
static_assert(TILE == 8 || TILE == 16 || TILE == 32, "TILE must be 8, 16 or 32");
static_assert(PAD % 4 == 0, "PAD must be a multiple of 4: float4 needs 16 bytes");

// May rows of this length be read four floats at a time?
static __device__ bool fits_float4(const float* matrix, int row_length) {
    return row_length % 4 == 0 && (size_t)matrix % 16 == 0;
}

// The four floats from p on, of which the first `left` exist; zeros for the others.
static __device__ float4 load4(const float* p, int left, bool vector) {
    if (vector && left >= 4) {
        return *(const float4*)p;
    }
    float4 v = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    if (left > 0) v.x = p[0];
    if (left > 1) v.y = p[1];
    if (left > 2) v.z = p[2];
    if (left > 3) v.w = p[3];
    return v;
}

static __device__ void store4(float* p, float4 v, int left, bool vector) {
    if (vector && left >= 4) {
        *(float4*)p = v;
        return;
    }
    if (left > 0) p[0] = v.x;
    if (left > 1) p[1] = v.y;
    if (left > 2) p[2] = v.z;
    if (left > 3) p[3] = v.w;
}

extern "C" __global__ void matmul_vectorised(
    const float* a, const float* b, float* c, int M, int N, int K) {
    __shared__ __align__(16) float a_tile[TILE][SIDE + PAD];  // transposed: [k][row]
    __shared__ __align__(16) float b_tile[TILE][SIDE];
    const int tx = threadIdx.x;
    const int ty = threadIdx.y;
    const int row0 = blockIdx.y * SIDE;
    const int col0 = blockIdx.x * SIDE;
    const int thread = ty * TILE + tx;
    // This thread brings four floats of one row of A, and four of one row of B.
    const int a_row = thread / (TILE / 4);
    const int a_k = thread % (TILE / 4) * 4;
    const bool a_vector = fits_float4(a, K);
    const bool b_vector = fits_float4(b, N);

    float sum[4][4] = {};
    for (int k0 = 0; k0 < K; k0 += TILE) {
        const int a_left = row0 + a_row < M ? K - (k0 + a_k) : 0;
        const float4 four_a =
            load4(a + (size_t)(row0 + a_row) * K + k0 + a_k, a_left, a_vector);
        a_tile[a_k + 0][a_row] = four_a.x;
        a_tile[a_k + 1][a_row] = four_a.y;
        a_tile[a_k + 2][a_row] = four_a.z;
        a_tile[a_k + 3][a_row] = four_a.w;
        const int b_left = k0 + ty < K ? N - (col0 + 4 * tx) : 0;
        const float4 four_b =
            load4(b + (size_t)(k0 + ty) * N + col0 + 4 * tx, b_left, b_vector);
        *(float4*)&b_tile[ty][4 * tx] = four_b;
        __syncthreads();
        for (int k = 0; k < TILE; ++k) {
            const float4 a4 = *(const float4*)&a_tile[k][4 * ty];
            const float4 b4 = *(const float4*)&b_tile[k][4 * tx];
            const float a_regs[4] = {a4.x, a4.y, a4.z, a4.w};
            const float b_regs[4] = {b4.x, b4.y, b4.z, b4.w};
            for (int i = 0; i < 4; ++i) {
                for (int j = 0; j < 4; ++j) {
                    sum[i][j] += a_regs[i] * b_regs[j];
                }
            }
        }
        __syncthreads();
    }
    const bool c_vector = fits_float4(c, N);
    for (int i = 0; i < 4; ++i) {
        const int row = row0 + 4 * ty + i;
        if (row < M) {
            const float4 four_c =
                make_float4(sum[i][0], sum[i][1], sum[i][2], sum[i][3]);
            const int left = N - (col0 + 4 * tx);
            store4(c + (size_t)row * N + col0 + 4 * tx, four_c, left, c_vector);
        }
    }
}
