#include "runtime.h"

#include "linear.h"

#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>
#if defined(__linux__)
#include <sys/syscall.h>
#endif
#if defined(__x86_64__)
#include <cpuid.h>
#elif defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#endif
#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#endif

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <new>
#include <stdexcept>

namespace radix {

#define RADIX_DECLARE(isa)      \
    namespace isa {             \
    extern const Kernels table; \
    }
#ifdef RADIX_HAS_AVX512VNNI
namespace avx512vnni {
extern const Int8Kernels int8_table;
}
#endif
#ifdef RADIX_HAS_AVXVNNI
namespace avxvnni {
extern const Int8Kernels int8_table;
}
#endif
#ifdef RADIX_HAS_AVX512BF16
namespace avx512bf16 {
extern const PairKernels pair_table;
extern const Bf16Kernels bf16_table;
}  // namespace avx512bf16
#endif
#ifdef RADIX_HAS_NEON_DOTPROD
namespace neon_dotprod {
extern const Int8Kernels int8_table;
}
#endif
#ifdef RADIX_HAS_AMX
namespace amx {
extern const Int8Kernels int8_table;
extern const PairKernels pair_table;
extern const Bf16Kernels bf16_table;
}  // namespace amx
#endif
#ifdef RADIX_HAS_AVX512
RADIX_DECLARE(avx512)
#endif
#ifdef RADIX_HAS_X86_64_V3
RADIX_DECLARE(x86_64_v3)
#endif
RADIX_DECLARE(portable)

// The kernels of another instruction set, with these replaced.
[[maybe_unused]] static Kernels changed(Kernels k, const char* name, const Int8Kernels& int8,
                                        const PairKernels& pairs = {}, const Bf16Kernels& bf16 = {}) {
    k.name = name, k.int8 = int8, k.pairs = pairs, k.bf16 = bf16;
    return k;
}

#ifdef RADIX_HAS_AVX512VNNI
// VNNI adds integer products and nothing else: the other kernels are avx512's.
static const Kernels* with_vnni() {
    static const Kernels table = changed(avx512::table, "avx512vnni", avx512vnni::int8_table);
    return &table;
}
#endif

#ifdef RADIX_HAS_AVXVNNI
// Likewise of 32 bytes, for processors without AVX-512.
static const Kernels* with_narrow_vnni() {
    static const Kernels table = changed(x86_64_v3::table, "avxvnni", avxvnni::int8_table);
    return &table;
}
#endif

#ifdef RADIX_HAS_AVX512BF16
// Every processor with bf16 dot products has VNNI.
static const Kernels* with_pairs() {
    static const Kernels table = changed(avx512::table, "avx512bf16", avx512vnni::int8_table,
                                         avx512bf16::pair_table, avx512bf16::bf16_table);
    return &table;
}
#endif

#ifdef RADIX_HAS_NEON_DOTPROD
// As with VNNI; the portable kernels are NEON's here.
static const Kernels* with_dotprod() {
    static const Kernels table = changed(portable::table, "neon_dotprod", neon_dotprod::int8_table);
    return &table;
}
#endif

#ifdef RADIX_HAS_AMX
// Tiles do the linear layers; the other kernels are avx512's.
static const Kernels* with_tiles() {
    static const Kernels table =
        changed(avx512::table, "amx", amx::int8_table, amx::pair_table, amx::bf16_table);
    return &table;
}
#endif

static const Kernels* const TABLES[] = {
#ifdef RADIX_HAS_AMX
    with_tiles(),
#endif
#ifdef RADIX_HAS_AVX512BF16
    with_pairs(),
#endif
#ifdef RADIX_HAS_AVX512VNNI
    with_vnni(),
#endif
#ifdef RADIX_HAS_NEON_DOTPROD
    with_dotprod(),
#endif
#ifdef RADIX_HAS_AVX512
    &avx512::table,
#endif
#ifdef RADIX_HAS_AVXVNNI
    with_narrow_vnni(),
#endif
#ifdef RADIX_HAS_X86_64_V3
    &x86_64_v3::table,
#endif
    &portable::table,
};

#if defined(__x86_64__)
// Bits of the second page of extended features.
constexpr unsigned AVX_VNNI = 1u << 4, AVX512_BF16 = 1u << 5;
static bool has_extended(unsigned bit) {
    unsigned a = 0, b = 0, c = 0, d = 0;
    return __get_cpuid_count(7, 1, &a, &b, &c, &d) && (a & bit);
}

// The processor has the tiles, and the system lets this process (all of its threads) use them.
static bool may_use_tiles() {
    static const bool answer = [] {
        unsigned a = 0, b = 0, c = 0, d = 0;
        constexpr unsigned bf16 = 1u << 22, tile = 1u << 24, int8 = 1u << 25, all = bf16 | tile | int8;
        if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || (d & all) != all) return false;
        if (!has_extended(AVX512_BF16)) return false;
#if defined(__linux__)
        constexpr int ARCH_REQ_XCOMP_PERM = 0x1023, XFEATURE_XTILEDATA = 18;
        return syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0;
#else
        return false;
#endif
    }();
    return answer;
}
#endif

static bool processor_has(const std::string& isa) {
    if (isa == "portable") return true;
#if defined(__x86_64__)
    __builtin_cpu_init();
    bool v3 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
              __builtin_cpu_supports("f16c") && __builtin_cpu_supports("bmi") &&
              __builtin_cpu_supports("bmi2");
    bool wide = v3 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
                __builtin_cpu_supports("avx512cd");
    if (isa == "x86_64_v3") return v3;
    if (isa == "avxvnni") return v3 && has_extended(AVX_VNNI);
    if (isa == "avx512") return wide;
    const bool vnni = wide && __builtin_cpu_supports("avx512vnni");
    if (isa == "avx512vnni") return vnni;
    if (isa == "avx512bf16") return vnni && has_extended(AVX512_BF16);
    if (isa == "amx") return vnni && __builtin_cpu_supports("avx512vbmi") && may_use_tiles();
#elif defined(__aarch64__) && defined(__linux__)
    constexpr unsigned long dotprod = 1ul << 20;  // HWCAP_ASIMDDP
    if (isa == "neon_dotprod") return getauxval(AT_HWCAP) & dotprod;
#endif
    return false;
}

std::vector<std::string> compiled_isas() {
    std::vector<std::string> names;
    for (auto t : TABLES) names.push_back(t->name);
    return names;
}
std::vector<std::string> supported_isas() {
    std::vector<std::string> names;
    for (auto& n : compiled_isas())
        if (processor_has(n)) names.push_back(n);
#if defined(__x86_64__)
    // Intel's cores multiply pairs of bfloat16 at half the rate of float32, AMD's at twice that rate.
    const auto pairs = std::find(names.begin(), names.end(), "avx512bf16");
    if (__builtin_cpu_is("intel") && pairs != names.end() && pairs + 1 != names.end())
        std::iter_swap(pairs, pairs + 1);  // with avx512vnni
#endif
    return names;
}

void Team::sleep(int now) {
    while (phase.load(std::memory_order_acquire) == now) phase.wait(now, std::memory_order_acquire);
}
void Team::wake() { phase.notify_all(); }

static const Kernels* in_use = nullptr;

void select_isa(const std::string& name) {
    for (auto t : TABLES)
        if (name == t->name) {
            if (!processor_has(name)) throw std::invalid_argument("this processor lacks " + name);
            in_use = t;
            return;
        }
    throw std::invalid_argument("instruction set not compiled: " + name);
}
const Kernels& kernels() {
    if (!in_use) select_isa(supported_isas().front());
    return *in_use;
}

static int thread_limit = 0;
int max_threads() {
    if (thread_limit == 0) thread_limit = std::min(omp_get_max_threads(), MAX_THREADS);
    return thread_limit;
}
void set_max_threads(int n) { thread_limit = std::max(1, std::min(n, MAX_THREADS)); }

static double one_core_us(double bytes, double flops) {
    return bytes / 8e3 + flops / 6e4;  // 8 GB/s, 60 GFLOP/s
}

int threads_for(double bytes, double flops) {
    int worth = int(one_core_us(bytes, flops) / 12.0);
    return std::max(1, std::min(worth, max_threads()));
}

int threads_for_step(double bytes, double flops) {
    const int n = threads_for(bytes, flops);
    const bool is_short = bytes < 20e6 && one_core_us(bytes, flops) < 12e3;
    return is_short && n >= omp_get_num_procs() ? std::max(1, n - 1) : n;
}

static char* grow(char* old, size_t& have, size_t need) {
    const size_t align = need >= (4u << 20) ? (2u << 20) : 4096;
    size_t bytes = (need + need / 4 + align - 1) / align * align;
    free(old);
    void* p = nullptr;
    if (posix_memalign(&p, align, bytes)) throw std::bad_alloc();
    if (align > 4096) want_huge(p, bytes);
    have = bytes;
    return (char*)p;
}

// Under the sanitizer a call may touch only the bytes that it has reserved, not an earlier call's.
static void fence([[maybe_unused]] char* data, [[maybe_unused]] size_t have, [[maybe_unused]] size_t need) {
#if defined(__SANITIZE_ADDRESS__)
    ASAN_UNPOISON_MEMORY_REGION(data, need);
    ASAN_POISON_MEMORY_REGION(data + need, have - need);
#endif
}

void Workspace::reserve(size_t shared_need, size_t local_need, int num_threads) {
    if (shared_need > shared_bytes) shared = grow(shared, shared_bytes, shared_need);
    const size_t asked = local_need;
    local_need = (local_need + 4095) / 4096 * 4096 + 4096;
    if (local_need > local_bytes || num_threads > threads) {
        size_t each = std::max(local_need, local_bytes), all = 0;
        int n = std::max(num_threads, threads);
        local = grow(local, all, each * size_t(n));
        local_bytes = each, threads = n;
    }
    fence(shared, shared_bytes, shared_need);
    for (int t = 0; t < threads; t++) fence(local + size_t(t) * local_bytes, local_bytes, asked);
}

Workspace& workspace() {
    struct Owner {
        Workspace w;
        ~Owner() { free(w.shared), free(w.local); }
    };
    static thread_local Owner owner;
    return owner.w;
}

static char *lent = nullptr, *lent_end = nullptr;
void end_lending() {
    if (lent_end > lent) munmap(lent, size_t(lent_end - lent));
    lent = lent_end = nullptr;
}
void lend_memory(Address begin, size_t bytes) {
    end_lending();
    lent = at<char>(begin), lent_end = lent + bytes;
}

// Fresh pages are zero and are not made before somebody writes to them: the threads that pack.
Memory::Memory(size_t n) {
    const size_t page = 4096, huge = size_t(2) << 20, align = n >= huge ? huge : page;
    bytes = std::max(page, (n + page - 1) / page * page);
    if (size_t(lent_end - lent) >= bytes) {
        data = lent, lent += bytes;
        fence((char*)data, bytes, n);
        return;
    }
    const size_t asked = bytes + align - page;
    void* got = mmap(nullptr, asked, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (got == MAP_FAILED) throw std::bad_alloc();
    const uintptr_t first = uintptr_t(got), begin = (first + align - 1) / align * align, end = first + asked;
    if (begin > first) munmap(got, begin - first);
    if (end > begin + bytes) munmap((void*)(begin + bytes), end - begin - bytes);
    data = (void*)begin;
    fence((char*)data, bytes, n);
    if (n >= huge) want_huge(data, bytes);
}
Memory::~Memory() {
    fence((char*)data, bytes, bytes);
    munmap(data, bytes);
}

}  // namespace radix
