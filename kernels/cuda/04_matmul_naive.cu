/* Matrix multiplication, naive: one thread, one element of C = A B.

The matrices are row-major; A is M x K, B is K x N.

Right answer, wrong neighbours. Consecutive threads (threadIdx.x) take consecutive
*rows*, so that the 32 threads of a warp read 32 elements of A that lie K floats apart.
Memory is moved in sectors of 32 bytes: the warp needs 32 of them and uses 4 bytes of
each.

Launch:   grid (ceil(N / block.y), ceil(M / block.x)), block (32, 32).
Counts:   2 M N K loads: every thread fetches a whole row of A and a whole column of B.
          A request to A takes 32 sectors, one to B takes 1 (the warp shares one
          column), 16.5 on average; a request to store C takes 32.
Read:     the playbook, "Memory coalescing"; siboehm.com/articles/22/CUDA-MMM, kernel 1.
*/
extern "C" __global__ void matmul_naive(
    const float* a, const float* b, float* c, int M, int N, int K) {
    // Neighbouring threads get neighbouring rows.
    const int row = blockIdx.y * blockDim.x + threadIdx.x;
    const int col = blockIdx.x * blockDim.y + threadIdx.y;
    if (row < M && col < N) {
        float sum = 0.0f;
        for (int k = 0; k < K; ++k) {
            sum += a[(size_t)row * K + k] * b[(size_t)k * N + col];
        }
        c[(size_t)row * N + col] = sum;
    }
}
