// Conversion of e4m3 codes on Hopper. (`Codes` of common/formats.cuh has it for every GPU.)
#pragma once

namespace hopper {

// Four codes as f16, in which they are exact. NaN stays NaN. The conversion reads the upper half of a register as well
// as the lower one, where the compiler sees both.
static __device__ __forceinline__ void widen_e4m3(unsigned codes, unsigned &first, unsigned &second) {
    asm("{\n"
        ".reg .b16 low, high;\n"
        "mov.b32 {low, high}, %2;\n"
        "cvt.rn.f16x2.e4m3x2 %0, low;\n"
        "cvt.rn.f16x2.e4m3x2 %1, high;\n"
        "}"
        : "=r"(first), "=r"(second)
        : "r"(codes));
}

} // namespace hopper
