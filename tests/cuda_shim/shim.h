// CUDA's execution model on one processor thread, so that a .cu file compiled as C++ can be run.
//
// Every thread of a block is a fiber that runs until it meets a barrier, a warp collective or its
// end. Which fiber goes next, and which block, is the caller's choice (in order, backwards,
// shuffled anew between barriers): code that lacks a barrier, or blocks that write one element
// differently, give other results in another order. Shared memory holds NaN bytes when a block
// starts. A touched guard page, an index outside an array and a barrier that only some threads
// reach end the launch with a message; the process goes on.
//
// `cuda_shim/__init__.py` generates a file that includes this header and then a kernel file.
#pragma once

#include <math.h>
#include <setjmp.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <ucontext.h>
#include <unistd.h>

#include <string>
#include <type_traits>
#include <vector>

#ifdef SHIM_LIST_KERNELS
#define __global__ shim_kernel
#define __launch_bounds__(threads, ...) shim_bounds(threads)
#else
#define __global__
#define __launch_bounds__(...)
#endif
#define __device__
#define __forceinline__ inline
#define __shared__ static __attribute__((section("bonsai_shared")))

struct alignas(8) uint2 { unsigned x, y; };
struct alignas(16) uint4 { unsigned x, y, z, w; };
struct alignas(8) float2 { float x, y; };
struct alignas(16) float4 { float x, y, z, w; };

namespace shim {

struct Index { unsigned x, y, z; };

constexpr int kWarp = 32;
constexpr size_t kStack = 256 << 10;
constexpr size_t kExchanged = 64;
constexpr int kPoison = 0xff;

enum class State { ready, at_barrier, in_warp, done };

struct Fiber {
  ucontext_t context;
  jmp_buf place;
  bool has_started;
  State state;
};

struct Warp {
  int arrived, phase, operation;
  unsigned char data[2][kWarp][kExchanged];
};

inline Index thread_index, block_index, block_size, grid_size;
inline std::vector<Fiber> fibers;
inline std::vector<Warp> warps;
inline unsigned char* stacks;
inline size_t num_stacks;
inline int current, arrived;
inline jmp_buf scheduler;
inline sigjmp_buf failure;
inline char message[256];
inline uintptr_t fault_address;
inline void (*body)(void**);
inline void** arguments;
inline unsigned char* dynamic_begin;

[[noreturn]] inline void fail(const char* what) {
  snprintf(message, sizeof message, "%s (block %u,%u, thread %u)", what, block_index.x,
           block_index.y, thread_index.x);
  siglongjmp(failure, 1);
}

inline void on_signal(int number, siginfo_t* info, void*) {
  fault_address = number == SIGSEGV || number == SIGBUS ? uintptr_t(info->si_addr) : 0;
  const bool is_access = number == SIGSEGV || number == SIGBUS;
  fail(is_access ? "memory that is not the kernel's was touched"
                 : "an index outside an array, or a shift by too much");
}

__attribute__((noinline)) inline void yield(State state) {
  Fiber& me = fibers[current];
  me.state = state;
  if (!_setjmp(me.place)) _longjmp(scheduler, 1);
}

inline void fiber_main() {
  for (;;) {
    body(arguments);
    yield(State::done);
  }
}

__attribute__((noinline)) inline void resume(int thread) {
  Fiber& fiber = fibers[thread];
  current = thread;
  thread_index = {unsigned(thread), 0, 0};
  fiber.state = State::ready;
  if (_setjmp(scheduler)) return;
  if (fiber.has_started) _longjmp(fiber.place, 1);
  fiber.has_started = true;
  getcontext(&fiber.context);
  fiber.context.uc_stack.ss_sp = stacks + thread * kStack;
  fiber.context.uc_stack.ss_size = kStack;
  fiber.context.uc_link = nullptr;
  makecontext(&fiber.context, fiber_main, 0);
  setcontext(&fiber.context);
}

__attribute__((noinline)) inline void barrier() {
  if (++arrived < int(fibers.size())) {
    yield(State::at_barrier);
    return;
  }
  arrived = 0;
  for (Fiber& fiber : fibers) {
    if (fiber.state == State::at_barrier) fiber.state = State::ready;
  }
}

// All lanes' `size` bytes, once all lanes of this warp have come.
__attribute__((noinline)) inline const unsigned char (*exchange(int operation, const void* mine,
                                                                size_t size))[kExchanged] {
  Warp& warp = warps[current / kWarp];
  if (warp.arrived == 0) {
    warp.operation = operation;
  } else if (warp.operation != operation) {
    fail("lanes of one warp call different collectives");
  }
  const int phase = warp.phase;
  memcpy(warp.data[phase][current % kWarp], mine, size);
  if (++warp.arrived < kWarp) {
    yield(State::in_warp);
  } else {
    warp.arrived = 0;
    warp.phase ^= 1;
    for (int lane = 0; lane < kWarp; ++lane) {
      Fiber& fiber = fibers[current / kWarp * kWarp + lane];
      if (fiber.state == State::in_warp) fiber.state = State::ready;
    }
  }
  return warp.data[phase];
}

inline uint64_t next_random(uint64_t& seed) {
  seed ^= seed << 13;
  seed ^= seed >> 7;
  return seed ^= seed << 17;
}

// order: 0 forwards, 1 backwards, 2 shuffled
inline void arrange(std::vector<int>& indices, int order, uint64_t& seed) {
  const int count = int(indices.size());
  for (int i = 0; i < count; ++i) indices[i] = order == 1 ? count - 1 - i : i;
  for (int i = count - 1; order == 2 && i > 0; --i) {
    std::swap(indices[i], indices[next_random(seed) % (i + 1)]);
  }
}

inline void run_block(int order, uint64_t& seed, std::vector<int>& threads) {
  for (Fiber& fiber : fibers) fiber.state = State::ready;
  for (Warp& warp : warps) warp.arrived = 0;
  arrived = 0;
  int left = int(fibers.size());
  while (left > 0) {
    arrange(threads, order, seed);
    bool has_moved = false;
    for (int thread : threads) {
      if (fibers[thread].state != State::ready) continue;
      resume(thread);
      has_moved = true;
      left -= fibers[thread].state == State::done;
    }
    if (!has_moved) fail("a barrier or a warp collective that some threads never reach");
  }
}

struct Guard {
  static constexpr int kSignals[] = {SIGSEGV, SIGBUS, SIGILL, SIGTRAP, SIGFPE};
  struct sigaction before[5];
  stack_t stack_before;
  std::vector<unsigned char> stack;

  Guard() : stack(64 << 10) {
    stack_t own = {};
    own.ss_sp = stack.data();
    own.ss_size = stack.size();
    sigaltstack(&own, &stack_before);
    struct sigaction action = {};
    action.sa_sigaction = on_signal;
    action.sa_flags = SA_SIGINFO | SA_ONSTACK;
    for (int i = 0; i < 5; ++i) sigaction(kSignals[i], &action, &before[i]);
  }
  ~Guard() {
    for (int i = 0; i < 5; ++i) sigaction(kSignals[i], &before[i], nullptr);
    sigaltstack(&stack_before, nullptr);
  }
};

extern "C" {
extern unsigned char __start_bonsai_shared[] __attribute__((weak));
extern unsigned char __stop_bonsai_shared[] __attribute__((weak));
}

inline bool run_all(int order, uint64_t seed, size_t shared_bytes) {
  Guard guard;
  if (sigsetjmp(failure, 1)) return false;
  std::vector<int> blocks(size_t(grid_size.x) * grid_size.y * grid_size.z);
  std::vector<int> threads(fibers.size());
  arrange(blocks, order, seed);
  for (int block : blocks) {
    block_index = {block % grid_size.x, block / grid_size.x % grid_size.y,
                   block / grid_size.x / grid_size.y};
    if (&__start_bonsai_shared[0] != nullptr) {
      memset(__start_bonsai_shared, kPoison, __stop_bonsai_shared - __start_bonsai_shared);
    }
    if (shared_bytes) memset(dynamic_begin, kPoison, shared_bytes);
    run_block(order, seed, threads);
  }
  return true;
}

inline bool launch(void (*function)(void**), const unsigned* grid, unsigned block, void** args,
                   size_t shared_bytes, void* shared, int order, uint64_t seed) {
  if (num_stacks < block) {
    if (stacks) munmap(stacks, num_stacks * kStack);
    stacks = static_cast<unsigned char*>(mmap(nullptr, block * kStack, PROT_READ | PROT_WRITE,
                                              MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
    num_stacks = block;
  }
  fibers.assign(block, Fiber{});
  warps.assign((block + kWarp - 1) / kWarp, Warp{});
  body = function;
  arguments = args;
  grid_size = {grid[0], grid[1], grid[2]};
  block_size = {block, 1, 1};
  dynamic_begin = static_cast<unsigned char*>(shared);
  fault_address = 0;
  message[0] = 0;
  return run_all(order, seed, shared_bytes);
}

// A kernel's parameters as letters: r an address to read, w one to write, i int64, f float32.
template <typename T>
constexpr char letter() {
  if (std::is_pointer<T>::value) {
    return std::is_const<typename std::remove_pointer<T>::type>::value ? 'r' : 'w';
  }
  return std::is_same<T, float>::value ? 'f' : std::is_integral<T>::value && sizeof(T) == 8 ? 'i'
                                                                                             : '?';
}

template <auto kernel>
struct Call;
template <typename... P, void (*kernel)(P...)>
struct Call<kernel> {
  static const char* signature() {
    static const char letters[] = {letter<P>()..., 0};
    return letters;
  }
  template <size_t... I>
  static void unpack(void** args, std::index_sequence<I...>) {
    kernel(*static_cast<P*>(args[I])...);
  }
  static void call(void** args) { unpack(args, std::index_sequence_for<P...>()); }
};

// ---- what device.cuh asks for

inline void* dynamic_shared() { return dynamic_begin; }

inline void check_alignment(const void* address, size_t size) {
  if (uintptr_t(address) % size) fail("an address is not a multiple of the access's size");
}

inline uint32_t bits_of(float value) {
  uint32_t bits;
  memcpy(&bits, &value, 4);
  return bits;
}
inline float float_from(uint32_t bits) {
  float value;
  memcpy(&value, &bits, 4);
  return value;
}

inline float float_of_bfloat(uint16_t bits) { return float_from(uint32_t(bits) << 16); }
inline uint16_t bfloat_of(float value) {
  const uint32_t bits = bits_of(value);
  if ((bits & 0x7fffffff) > 0x7f800000) return 0x7fff;
  return uint16_t((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

inline float float_of_half(uint16_t bits) {
  const uint32_t sign = uint32_t(bits & 0x8000) << 16, rest = bits & 0x7fff;
  if (rest >= 0x7c00) return float_from(sign | 0x7f800000 | (rest & 0x3ff) << 13);
  // 2^112 moves the exponent from half's bias to float's, subnormals included
  return float_from(sign | bits_of(float_from(rest << 13) * 0x1p112f));
}
inline uint16_t half_of(float value) {
  const uint32_t bits = bits_of(value);
  const uint16_t sign = uint16_t(bits >> 16 & 0x8000);
  const uint32_t size = bits & 0x7fffffff;
  if (size > 0x7f800000) return 0x7fff;
  if (size >= 0x477ff000) return sign | 0x7c00;
  if (size < 0x38800000) {
    // below 2^-14 a half's step is 2^-24: the addition rounds to it
    return sign | uint16_t(bits_of(float_from(size) + 0.5f) - bits_of(0.5f));
  }
  return sign | uint16_t((size - 0x38000000 + 0xfff + (size >> 13 & 1)) >> 13);
}

// d plus eight exact products as tensor cores are known to add them: every term is cut off two bits
// below the last bit of the largest one, and so is the sum's own end. No better than the hardware.
inline float add_truncated(float d, const float (&products)[8]) {
  float largest = fabsf(d);
  for (float product : products) largest = fmaxf(largest, fabsf(product));
  double sum = d;
  if (!(largest > 0x1p-100f && largest < 0x1p126f)) {
    for (float product : products) sum += product;
    return float(sum);
  }
  int exponent;
  frexpf(largest, &exponent);
  const double step = ldexp(1.0, exponent - 26);
  sum = trunc(d / step);
  for (float product : products) sum += trunc(product / step);
  sum *= step;
  float result = float(sum);
  if (fabs(double(result)) > fabs(sum)) result = nextafterf(result, 0.0f);
  return result;
}

template <typename ToFloat>
void multiply_add(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1,
                  ToFloat to_float) {
  const uint32_t mine[6] = {a[0], a[1], a[2], a[3], b0, b1};
  const auto all = exchange(2, mine, sizeof mine);
  const auto value = [&](int lane, int word, int half) {
    uint32_t bits;
    memcpy(&bits, all[lane] + 4 * word, 4);
    return to_float(uint16_t(bits >> 16 * half));
  };
  const int lane = current % kWarp, r = lane / 4, c = lane % 4 * 2;
  for (int i = 0; i < 4; ++i) {
    for (int eight = 0; eight < 2; ++eight) {
      float products[8];
      for (int k = 0; k < 8; ++k) {
        products[k] = value(r * 4 + k / 2, i / 2 + 2 * eight, k % 2) *
                      value((c + i % 2) * 4 + k / 2, 4 + eight, k % 2);
      }
      d[i] = add_truncated(d[i], products);
    }
  }
}

}  // namespace shim

#define threadIdx shim::thread_index
#define blockIdx shim::block_index
#define blockDim shim::block_size
#define gridDim shim::grid_size

inline void __syncthreads() { shim::barrier(); }
inline void __syncwarp(unsigned = 0xffffffffu) {
  const char nothing = 0;
  shim::exchange(0, &nothing, 1);
}
template <typename T>
T __shfl_xor_sync(unsigned, T value, int mask) {
  const auto all = shim::exchange(1, &value, sizeof value);
  memcpy(&value, all[shim::current % shim::kWarp ^ mask], sizeof value);
  return value;
}
inline float __uint_as_float(unsigned bits) { return shim::float_from(bits); }
inline unsigned __float_as_uint(float value) { return shim::bits_of(value); }
inline unsigned __funnelshift_r(unsigned low, unsigned high, unsigned shift) {
  return unsigned((uint64_t(high) << 32 | low) >> (shift & 31));
}

// ---- what Python calls

#define SHIM_EXPORT __attribute__((visibility("default")))

extern "C" {
SHIM_EXPORT const char* shim_message() { return shim::message; }
SHIM_EXPORT uintptr_t shim_fault_address() { return shim::fault_address; }

// `bytes` (whole pages) between two pages that nobody may touch.
SHIM_EXPORT void* shim_allocate(size_t bytes) {
  const size_t page = size_t(sysconf(_SC_PAGESIZE));
  void* all = mmap(nullptr, bytes + 2 * page, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (all == MAP_FAILED) return nullptr;
  unsigned char* begin = static_cast<unsigned char*>(all) + page;
  if (bytes) mprotect(begin, bytes, PROT_READ | PROT_WRITE);
  return begin;
}
SHIM_EXPORT void shim_release(void* begin, size_t bytes) {
  const size_t page = size_t(sysconf(_SC_PAGESIZE));
  munmap(static_cast<unsigned char*>(begin) - page, bytes + 2 * page);
}
}

#define SHIM_KERNEL(name, bounds)                                                                 \
  extern "C" SHIM_EXPORT const char* shim_signature_##name() {                                    \
    return shim::Call<name>::signature();                                                         \
  }                                                                                               \
  extern "C" SHIM_EXPORT int shim_bounds_##name() { return bounds; }                              \
  extern "C" SHIM_EXPORT int shim_launch_##name(const unsigned* grid, unsigned block, void** args, \
                                                size_t shared_bytes, void* shared, int order,     \
                                                uint64_t seed) {                                  \
    return shim::launch(shim::Call<name>::call, grid, block, args, shared_bytes, shared, order,   \
                        seed);                                                                    \
  }
