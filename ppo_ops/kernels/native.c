/* CPU kernels of ppo_ops: the row loop, threads and the choice of instruction set. No Python or torch headers: one
 * library serves every version of both. native.py fills a `Call` and calls in.
 *
 *   native.c             instruction sets, threads, what is exported
 *   native_rows.inc      one row of statistics or gradient out of blocks, in scalars
 *   native_blocks.inc    the vector loops, instantiated for each element type and instruction set by native_isa.inc
 *   native_avx512.inc, native_avx2.inc, native_baseline.inc    vector primitives
 *   native_finish.inc    outputs out of statistics, where one rank has the whole vocabulary
 *
 * Note [One exponential]
 *     e^((x - M) / T) = 2^((x - M) * c), c = log2(e) / T rounded once, M the largest logit so far: shift first, so that a
 *     common offset costs no precision. With d = max(x - M, -127 / c), 2^(d * c) = 2^(n/16) * 2^f: adding a large
 *     `magic` rounds d * c to a sixteenth; its low bits index a table, the others are the exponent; f goes through a
 *     cubic (error 2^-29 of the result). Table entries hold 2^(j/16) less what the shifted index adds to the exponent.
 *     At -127 the bits sum to zero, so an absent column's term is exactly 0 and its d finite: never 0 * -inf. Terms
 *     below 2^-126 lose their accuracy, not their sign; the largest term is 1. NaNs pass through.
 *
 * Note [Two passes in the cache]
 *     A block's maximum is taken first, then its sums relative to the largest logit so far: running sums are rescaled
 *     once a block and only when the maximum grew. The second pass finds its block in the L1 cache and prefetches the
 *     next one, so that the first pass does not wait for memory. Sums of a block stay in float32 lanes (at most 64 terms
 *     each), sums over blocks are in float64.
 *
 * Note [Same bits]
 *     A row belongs to one thread, blocks start at the row's first element, and all loads are unaligned loads: a row's
 *     bits depend on its values alone.
 */
#include <math.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#ifdef __linux__
#include <sys/mman.h>
#endif
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#define EXPORT __attribute__((visibility("default")))
#define ALWAYS_INLINE inline __attribute__((always_inline))
#define JOIN_(a, b, c) a##_##b##_##c
#define JOIN3(a, b, c) JOIN_(a, b, c)

/* Elements of a block: 8 KiB of float32, so that a block and the prefetched next one fit a 32 KiB cache. */
#define BLOCK 2048
/* A kept set shares the exponential of the whole row while its maximum is at most this far below (natural units): the
 * error of an exponent grows with its size, up to 2^-24 * MAX_SHARED_GAP relative. */
#define MAX_SHARED_GAP 8.0

/* What a sum or a gradient needs of the kept set. KEPT: both sets, one exponential. */
enum { UNMASKED = 0, SHIFTED = 1, KEPT = 2, ONLY_KEPT = 4, KEPT_APART = 8 };

typedef struct {
  float shift, scale, lowest; /* 2^(max(x - shift, lowest) * scale) */
} Exponent;

/* grad = e * (constant + slope * (x - shift)), constant_kept instead of constant where kept; KEPT_APART: plus
 * constant_kept * e', with an exponential of its own, where kept. */
typedef struct {
  Exponent exponent;
  float constant, slope, constant_kept, shift_kept;
} Gradient;

typedef struct {
  void (*max_block)(const void *x, const uint8_t *keep, int64_t n, float *out);
  void (*sum_block)(const void *x, const uint8_t *keep, int64_t n, int terms, const Exponent *exponent, float *out);
  void (*grad_row)(const void *x, const uint8_t *keep, void *grad, int64_t n, int form, const Gradient *gradient);
} Kernels;

#if defined(__clang__)
#define PRAGMA(text) _Pragma(#text)
#define TARGET(features) PRAGMA(clang attribute push(__attribute__((target(features))), apply_to = function))
#define END_TARGET _Pragma("clang attribute pop")
#else
#define PRAGMA(text) _Pragma(#text)
#define TARGET(features) _Pragma("GCC push_options") PRAGMA(GCC target(features))
#define END_TARGET _Pragma("GCC pop_options")
#endif

#include "native_baseline.inc"
#include "native_isa.inc"
#if defined(__x86_64__)
TARGET("avx2,fma,f16c")
#include "native_avx2.inc"
#include "native_isa.inc"
END_TARGET
TARGET("avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c")
#include "native_avx512.inc"
#include "native_isa.inc"
END_TARGET
#endif

enum { F32, BF16, F16 };
typedef struct {
  const char *name;
  const Kernels *kernels[3];
} InstructionSet;

static const InstructionSet instruction_sets[] = {
#if defined(__x86_64__)
    {"avx512", {&kernels_avx512_f32, &kernels_avx512_bf16, &kernels_avx512_f16}},
    {"avx2", {&kernels_avx2_f32, &kernels_avx2_bf16, &kernels_avx2_f16}},
#endif
    {"baseline", {&kernels_baseline_f32, &kernels_baseline_bf16, &kernels_baseline_f16}},
};
static const InstructionSet *chosen;

/* A call, all fields 8 bytes wide: native.py packs it as int64. Strides count elements. */
typedef struct {
  const char *logits;
  int64_t logits_stride, dtype, rows, vocab_local, columns, vocab_start, ignore_index;
  const int64_t *target;
  int64_t target_stride;
  const uint8_t *keep_mask;
  int64_t keep_stride;
  const float *temperature;
  int64_t temperature_stride;
  float *stats; /* backward: the normalizers */
  int64_t stats_stride, kinds, threads;
  const float *grad_log_prob;
  int64_t grad_log_prob_stride;
  const float *grad_entropy;
  int64_t grad_entropy_stride;
  char *grad_logits;
  int64_t grad_stride;
  const char *ids; /* ragged kept sets: ids (int64 if wide, else int32) and offsets of rows */
  int64_t ids_wide;
  const int64_t *offsets;
  float *dense;
  int64_t dense_stride;
  float *log_prob, *entropy; /* what one rank returns, contiguous; null where statistics are all that is wanted */
  int64_t vocab_end;         /* with log_prob: V, or -1 if it is not known */
} Call;

#include "native_rows.inc"
#include "native_kept.inc"
#include "native_finish.inc"

typedef void (*RowFunction)(const void *context, int64_t row);
typedef struct {
  const void *context;
  RowFunction function;
  int64_t rows, rows_at_once;
  _Atomic int64_t next;
} Job;

static void *work(void *argument) {
  Job *job = argument;
  const int64_t rows = job->rows;
  for (;;) {
    int64_t first = atomic_fetch_add_explicit(&job->next, job->rows_at_once, memory_order_relaxed);
    if (first >= rows) return 0;
    int64_t last = first + job->rows_at_once < rows ? first + job->rows_at_once : rows;
    for (int64_t row = first; row < last; row++) job->function(job->context, row);
  }
}

static void work_in_pool(void *argument) { work(argument); }

/* GOMP_parallel of the OpenMP runtime that torch has loaded, or null. Its pool is awake and placed on the right cores. */
typedef void (*Parallel)(void (*function)(void *), void *argument, unsigned threads, unsigned flags);
static Parallel parallel;

enum { MAX_THREADS = 256 };

/* `columns`: about how many elements' work a row is. */
static void run(const void *context, RowFunction function, int64_t rows, int64_t columns, int64_t threads_allowed) {
  if (columns < 1) columns = 1;
  /* Elements a thread must have. A pool's thread wakes in microseconds; a new one starts on its creator's core and took
   * 0.3 ms to be moved (Linux 6.18, 2 cores, 2026-12-02: 16 x 151,936 bfloat16 0.29 ms pool, 0.83 new, 0.65 alone). */
  const int64_t least = parallel ? 1 << 15 : 1 << 22;
  Job job = {context, function, rows, (1 << 15) / columns + 1, 0};
  int64_t threads = rows * columns / least;
  if (threads > threads_allowed) threads = threads_allowed;
  if (threads > rows) threads = rows;
  if (threads > MAX_THREADS) threads = MAX_THREADS;
  if (threads <= 1) {
    work(&job);
  } else if (parallel) {
    parallel(work_in_pool, &job, (unsigned)threads, 0);
  } else {
    pthread_t others[MAX_THREADS];
    int64_t started = 0;
    while (started < threads - 1 && !pthread_create(&others[started], 0, work, &job)) started++;
    work(&job);
    for (int64_t i = 0; i < started; i++) pthread_join(others[i], 0);
  }
}

static void run_call(const Call *call, RowFunction function) {
  run(call, function, call->rows, call->offsets ? kept_work(call) : call->columns, call->threads);
}

/* Statistics, and what one rank returns where it is asked for: then the first bad target's row is returned instead of
 * anything being computed, -1 if there is none. */
EXPORT int64_t ppo_vocab_stats(const Call *call) {
  if (!call->log_prob) {
    run_call(call, call->offsets ? kept_stats_row : stats_row);
    return -1;
  }
  const int64_t bad =
      ppo_first_bad_target(call->target, call->target_stride, call->rows, call->ignore_index, call->vocab_end);
  if (bad < 0) run_call(call, finished_row);
  return bad;
}

EXPORT void ppo_logits_grad(const Call *call) {
#ifdef MADV_HUGEPAGE
  /* A gradient is written once, all of it, and mostly fresh from the system: large pages save most of the page faults.
   * Above 32 MiB an allocation is a mapping of its own, which the advice leaves with. */
  const size_t bytes = (size_t)call->rows * (size_t)call->grad_stride * element_size(call);
  if (call->grad_logits != call->logits && bytes > (32u << 20)) {
    const uintptr_t page = 2u << 20, start = (uintptr_t)call->grad_logits;
    const uintptr_t first = (start + page - 1) & ~(page - 1), last = (start + bytes) & ~(page - 1);
    madvise((void *)first, last - first, MADV_HUGEPAGE);
  }
#endif
  run_call(call, call->offsets ? kept_grad_row : grad_row);
}

/* native.py compares this with what it packs: an editable install may hold an older library. */
EXPORT int64_t ppo_call_bytes(void) { return sizeof(Call); }

EXPORT void ppo_set_parallel(Parallel function) { parallel = function; }

static int runs_here(const char *name) {
#if defined(__x86_64__)
  __builtin_cpu_init();
  int avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  if (!strcmp(name, "avx2")) return avx2;
  if (!strcmp(name, "avx512"))
    return avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
#endif
  return !strcmp(name, "baseline");
}

/* Chooses the named instruction set, or the best that this CPU runs; returns its name, or null if it cannot. */
EXPORT const char *ppo_choose(const char *name) {
  for (size_t i = 0; i < sizeof instruction_sets / sizeof *instruction_sets; i++) {
    const InstructionSet *set = &instruction_sets[i];
    if ((!name || !strcmp(name, set->name)) && runs_here(set->name)) {
      chosen = set;
      return set->name;
    }
  }
  return 0;
}
