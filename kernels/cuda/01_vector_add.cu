/* Vector addition: one thread, one element.

A kernel is an ordinary function that very many threads run at once. Each asks "which
one am I?" (threadIdx within its block, blockIdx within the grid) and takes the element
of that number. Blocks have a fixed size, so the last one reaches beyond the end: the
guard `i < n` sends those threads home.

Launch:   grid ceil(n / block), block a multiple of 32, such as 256.
Counts:   2 n loads, n stores. The 32 threads of a warp ask for 32 neighbouring floats,
          128 bytes, which is 4 sectors of 32 bytes: nothing is moved that is not used.
Limit:    1 flop for 12 bytes. Memory decides its speed; no rearrangement of the
          arithmetic helps.
Read:     CUDA C++ Programming Guide, "Kernels" and "Thread Hierarchy".
*/
extern "C" __global__ void vector_add(const float* a, const float* b, float* c, int n) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) {
        c[i] = a[i] + b[i];
    }
}
