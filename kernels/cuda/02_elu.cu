/* ELU in one kernel: y = x for x > 0, alpha (e^x - 1) otherwise.

Written with array operations (exp, minus one, times alpha, compare, select) each step
reads its input from memory and writes its result back. Here the steps happen in
registers, between one load and one store: that is all "fusing" means for an elementwise
function.

Near zero e^x is nearly 1, and subtracting 1 throws away the digits that matter: in
float32, and for x = -0.000001, expf(x) - 1 is wrong by more than one per cent. expm1f
computes the difference directly.

Launch:   grid ceil(n / block), block a multiple of 32, such as 256.
Counts:   n loads, n stores, whatever the number of steps in between.
Improves: on one kernel a step, which loads and stores n elements for each of them.
Read:     Clevert et al. 2015 (arXiv:1511.07289), section 3; the playbook's section on
          torch.compile and Triton uses the same function.
*/
extern "C" __global__ void elu(const float* x, float* y, float alpha, int n) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) {
        const float v = x[i];
        y[i] = v > 0.0f ? v : alpha * expm1f(v);
    }
}
