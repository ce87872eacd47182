// What Python has to know of a kernel's parameters and of a variable: typedefs and templates resolved.
//
// For g++ and for nvcc. The last entry of a kernel's array has no type.
#pragma once

#include <type_traits>

namespace kernels_loader {
struct Described {
    const char* type;   // of the value, or of what the pointer points to
    int points, constant;
    unsigned long long bytes;  // of one element
    unsigned long long size;   // of the parameter, or of the whole variable
};

template <class T>
constexpr unsigned long long size_of() {
    if constexpr (std::is_void<T>::value || std::is_function<T>::value) return 1;
    else return sizeof(T);
}

#define NAME(T_, name) \
    if (std::is_same<T, T_>::value) return name;
#define NAME_VECTORS(base) \
    NAME(base##1, #base "1") NAME(base##2, #base "2") NAME(base##3, #base "3") NAME(base##4, #base "4")
template <class T>
constexpr const char* name_of() {
    NAME(void, "void") NAME(bool, "bool") NAME(float, "float") NAME(double, "double")
#ifdef __CUDA_FP16_TYPES_EXIST__
    NAME(__half, "half") NAME(__half2, "half2")
#endif
#ifdef __CUDA_BF16_TYPES_EXIST__
    NAME(__nv_bfloat16, "bfloat16") NAME(__nv_bfloat162, "bfloat162")
#endif
    NAME_VECTORS(char) NAME_VECTORS(uchar) NAME_VECTORS(short) NAME_VECTORS(ushort)
    NAME_VECTORS(int) NAME_VECTORS(uint) NAME_VECTORS(longlong) NAME_VECTORS(ulonglong)
    NAME_VECTORS(float) NAME_VECTORS(double)
    if (!std::is_integral<T>::value && !std::is_enum<T>::value)
        return std::is_pointer<T>::value ? "pointer" : "struct";
    constexpr const char* names[] = {
        "signed char", "unsigned char", "short", "unsigned short",
        "int", "unsigned int", "long long", "unsigned long long"};
    constexpr bool negative = std::is_enum<T>::value || std::is_signed<T>::value;
    return names[(size_of<T>() == 1 ? 0 : size_of<T>() == 2 ? 2 : size_of<T>() == 4 ? 4 : 6) + !negative];
}
#undef NAME_VECTORS
#undef NAME

template <class T>
struct Variable {
    static constexpr Described described[] = {
        {name_of<std::remove_cv_t<std::remove_all_extents_t<T>>>(), 1, std::is_const<T>::value,
         sizeof(std::remove_all_extents_t<T>), sizeof(T)}};
};

template <class T>
struct Parameter {
    using Base = std::remove_pointer_t<T>;
    static constexpr Described value = {name_of<std::remove_cv_t<Base>>(), std::is_pointer<T>::value,
                                        std::is_const<Base>::value, size_of<Base>(), sizeof(T)};
};

template <class Kernel>
struct Parameters;
template <class... P>
struct Parameters<void (*)(P...)> {
    static constexpr Described described[] = {Parameter<std::remove_cv_t<P>>::value..., {}};
};
}  // namespace kernels_loader
