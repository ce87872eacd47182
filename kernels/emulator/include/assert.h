// assert() of a kernel: ends the launch with an error instead of ending the process.
#undef assert
#ifdef NDEBUG
#define assert(condition) (static_cast<void>(0))
#else
#define assert(condition) \
    ((condition) ? static_cast<void>(0) : emulator_trap("assert(" #condition ")", __LINE__))
#endif
