// How Python calls a kernel: for each one, five exported functions made from its C++ signature.
#pragma once
#include <stddef.h>
#include <type_traits>
#include <utility>
#include "bfloat16.h"

namespace cuemu {

// An enum travels as the integer behind it.
template <class T, bool is_enum = std::is_enum<T>::value> struct Plain {
    typedef T type;
};
template <class T> struct Plain<T, true> {
    typedef typename std::underlying_type<T>::type type;
};

// One letter a parameter: p pointer, c pointer to const, f float, d double, i signed, u unsigned, s struct.
template <class T> struct ParameterKind {
    static constexpr char of_pointer =
        std::is_const<typename std::remove_pointer<T>::type>::value ? 'c' : 'p';
    static constexpr char of_float = sizeof(T) == 8 ? 'd' : 'f';
    typedef typename Plain<typename std::remove_cv<T>::type>::type Number;
    static constexpr char of_integer = std::is_signed<Number>::value ? 'i' : 'u';
    static constexpr char value = std::is_pointer<T>::value          ? of_pointer
                                  : std::is_floating_point<T>::value ? of_float
                                  : std::is_integral<Number>::value  ? of_integer
                                                                     : 's';
};

// What a pointer points at: f float or double, h half, b bfloat16, i and u integers, s struct or vector, v
// void; '-' and size 0 for a scalar.
template <class T> struct Pointee {
    static constexpr char kind = '-';
    static constexpr int size = 0;
};
template <class T> struct Pointee<T*> {
    typedef typename Plain<typename std::remove_cv<T>::type>::type Element;
    static constexpr char of_integer = std::is_signed<Element>::value ? 'i' : 'u';
    static constexpr char kind = std::is_same<Element, __half>::value          ? 'h'
                                 : std::is_same<Element, __nv_bfloat16>::value ? 'b'
                                 : std::is_floating_point<Element>::value      ? 'f'
                                 : std::is_integral<Element>::value            ? of_integer
                                                                               : 's';
    static constexpr int size = (int)sizeof(Element);
};
template <> struct Pointee<void*> {
    static constexpr char kind = 'v';
    static constexpr int size = 0;
};
template <> struct Pointee<const void*> {
    static constexpr char kind = 'v';
    static constexpr int size = 0;
};

template <class Function> struct Signature;
template <class... Parameters> struct Signature<void (*)(Parameters...)> {
    template <size_t... I>
    static void call_with(void (*kernel)(Parameters...), void** arguments, std::index_sequence<I...>)
    {
        kernel(*(typename std::remove_reference<Parameters>::type*)arguments[I]...);
    }
    static void call(void (*kernel)(Parameters...), void** arguments)
    {
        call_with(kernel, arguments, std::index_sequence_for<Parameters...>());
    }
    static const char* kinds()
    {
        static const char letters[] = {ParameterKind<Parameters>::value..., 0};
        return letters;
    }
    static const int* sizes()
    {
        static const int bytes[] = {(int)sizeof(Parameters)..., 0};
        return bytes;
    }
    static const char* pointee_kinds()
    {
        static const char letters[] = {Pointee<typename std::remove_cv<Parameters>::type>::kind..., 0};
        return letters;
    }
    static const int* pointee_sizes()
    {
        static const int bytes[] = {Pointee<typename std::remove_cv<Parameters>::type>::size..., 0};
        return bytes;
    }
};
}  // namespace cuemu

#ifdef _WIN32
#define CUEMU_EXPORTED extern "C" __declspec(dllexport)
#else
#define CUEMU_EXPORTED extern "C" __attribute__((visibility("default")))
#endif

// CUEMU_EXPORT(id, kernel) or, for a template, CUEMU_EXPORT(id, kernel<float, 32>).
#define CUEMU_EXPORT(ID, ...)                                                                                \
    CUEMU_EXPORTED __attribute__((no_sanitize("thread"))) void cuemu_call_##ID(void** arguments)             \
    {                                                                                                        \
        cuemu::Signature<decltype(&__VA_ARGS__)>::call(&__VA_ARGS__, arguments);                             \
    }                                                                                                        \
    CUEMU_EXPORTED const char* cuemu_sig_##ID()                                                              \
    {                                                                                                        \
        return cuemu::Signature<decltype(&__VA_ARGS__)>::kinds();                                            \
    }                                                                                                        \
    CUEMU_EXPORTED const int* cuemu_sizes_##ID()                                                             \
    {                                                                                                        \
        return cuemu::Signature<decltype(&__VA_ARGS__)>::sizes();                                            \
    }                                                                                                        \
    CUEMU_EXPORTED const int* cuemu_pointee_##ID()                                                           \
    {                                                                                                        \
        return cuemu::Signature<decltype(&__VA_ARGS__)>::pointee_sizes();                                    \
    }                                                                                                        \
    CUEMU_EXPORTED const char* cuemu_pointee_kind_##ID()                                                     \
    {                                                                                                        \
        return cuemu::Signature<decltype(&__VA_ARGS__)>::pointee_kinds();                                    \
    }
