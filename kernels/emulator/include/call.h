// Calls a kernel with arguments given as an array of pointers to them, as cudaLaunchKernel does.
#pragma once

#include <utility>

namespace emulator {
template <class... P, size_t... I>
EMULATOR_UNCOUNTED inline void call_indexed(void (*volatile kernel)(P...), void** arguments,
                                     std::index_sequence<I...>) {
    (void)arguments;
    kernel(*static_cast<std::remove_reference_t<P>*>(arguments[I])...);
}

template <class... P>
EMULATOR_UNCOUNTED void call(void (*kernel)(P...), void** arguments) {
    call_indexed<P...>(kernel, arguments, std::index_sequence_for<P...>{});
}
}  // namespace emulator
