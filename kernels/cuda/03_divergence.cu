/* Divergence: a warp that takes both sides of a branch pays for both.

The 32 threads of a warp share one instruction stream. Where they disagree about an
`if`, the warp runs one side with the others switched off, then the other side. Both
kernels here compute the same, what a gated layer with interleaved columns needs: the
sigmoid of the elements with an even index (the gates), the tanh of those with an odd
one (the values).

divergence_bad   thread i takes element i: every warp has 16 even and 16 odd elements
                 and runs sigmoid and tanh, each with half of its lanes idle.
divergence_good  the first half of the block takes the even elements, the second half
                 the odd ones: every warp runs one of the two, with all lanes busy. Only
                 the numbering changed.

Launch:   grid ceil(n / block), block a multiple of 64, such as 256.
Counts:   n loads and n stores in both. Bad: in every warp the branch diverges, and 16
          of 32 lanes idle on each side. Good: none, apart from the end of the array.
Improves: idle lanes. It is not free: a warp now touches every second float, 8 sectors a
          request instead of 4. Worth it where the sides are long; best is to store the
          two kinds apart, so that a warp's elements are of one kind and side by side.
Read:     the playbook, "Minimizing control divergence"; CUDA C++ Best Practices Guide,
          "Branching and Divergence".
*/
extern "C" __global__ void divergence_bad(const float* x, float* y, int n) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) {
        float v = x[i];
        if (i % 2 == 0) {
            v = 1.0f / (1.0f + expf(-v));
        } else {
            v = tanhf(v);
        }
        y[i] = v;
    }
}

extern "C" __global__ void divergence_good(const float* x, float* y, int n) {
    const int half = blockDim.x / 2;
    const bool even = threadIdx.x < half;  // the same for all threads of a warp
    const int pair = even ? threadIdx.x : threadIdx.x - half;
    const int i = blockIdx.x * blockDim.x + 2 * pair + (even ? 0 : 1);
    if (i < n) {
        float v = x[i];
        if (even) {
            v = 1.0f / (1.0f + expf(-v));
        } else {
            v = tanhf(v);
        }
        y[i] = v;
    }
}
