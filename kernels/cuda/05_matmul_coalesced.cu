/* Matrix multiplication, coalesced: neighbouring threads take neighbouring columns.

The same kernel as the naive one with x and y exchanged. Now the 32 threads of a warp
share one row of A (all want the same float: one sector, broadcast) and read 32
neighbouring floats of B (128 bytes in a row: 4 sectors, all of it used). The hardware
"coalesces" such a request into few transfers.

Launch:   grid (ceil(N / block.x), ceil(M / block.y)), block (32, 32).
Counts:   still 2 M N K loads; 1 sector for A, 4 for B: 2.5 a request instead of 16.5.
          Stores: 4, not 32.
Improves: on 04 in sectors a request. The number of requests is unchanged.
Read:     the playbook, "Memory coalescing", which gets the same order from a
          one-dimensional block by threadIdx.x / BLOCKSIZE and threadIdx.x % BLOCKSIZE;
          CUDA C++ Best Practices Guide, "Coalesced Access to Global Memory".
*/
extern "C" __global__ void matmul_coalesced(
    const float* a, const float* b, float* c, int M, int N, int K) {
    // Neighbouring threads get neighbouring columns.
    const int row = blockIdx.y * blockDim.y + threadIdx.y;
    const int col = blockIdx.x * blockDim.x + threadIdx.x;
    if (row < M && col < N) {
        float sum = 0.0f;
        for (int k = 0; k < K; ++k) {
            sum += a[(size_t)row * K + k] * b[(size_t)k * N + col];
        }
        c[(size_t)row * N + col] = sum;
    }
}
