// Read-bandwidth probe: the roofline that the kernels' speed is compared with.

// Eight 16-byte loads in flight per thread, coalesced.
constexpr int READS = 8;

extern "C" __global__ void __launch_bounds__(512) read_ceiling(const uint4 *data, long long count, unsigned *sink) {
    long long step = (long long)gridDim.x * blockDim.x;
    unsigned sum = 0;
    long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    for (; i + (READS - 1) * step < count; i += READS * step) {
        uint4 x[READS];
#pragma unroll
        for (int r = 0; r < READS; r++) {
            asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                         : "=r"(x[r].x), "=r"(x[r].y), "=r"(x[r].z), "=r"(x[r].w)
                         : "l"(data + i + r * step));
        }
#pragma unroll
        for (int r = 0; r < READS; r++) sum ^= x[r].x ^ x[r].y ^ x[r].z ^ x[r].w;
    }
    for (; i < count; i += step) sum ^= data[i].x ^ data[i].y ^ data[i].z ^ data[i].w;
    // Never true, but the compiler cannot know, so the loads are not removed.
    if (sum == 0x5eed5eed) *sink = sum;
}
