/* Products of few rows and large weights on x86-64, at the speed at which memory delivers the weights; norms of rows.
 *
 * A row's sums are added up in one order: they depend neither on the other rows nor on the number of threads. In fp32
 * they are the same on all CPUs with FMA. With bf16 weights products are exact and sums are fp32; CPUs with AVX512-BF16
 * add them up in pairs, and are the same among themselves.
 *
 * Compiled with the package where there is a C compiler; slipstream/engine/kernels/products.py calls it. */

#if defined(__x86_64__) && defined(__GNUC__)
#include <immintrin.h>
#include <string.h>

enum { FLOATS = 0, PAIRS = 1 };
enum { NONE = 0, AVX2 = 1, AVX512 = 2, AVX512_BF16 = 3 };
#define MOST_ROWS 256
#define CHUNK 128 /* input features whose weights stay in the first cache for all rows */

struct product {
    const void *weights; /* [features / width, depth, width], features filled up with zeros */
    const float *bias;   /* [features], or null */
    long features;
    long depth; /* input features; pairs of them in bf16 */
    long kind;
    long level;
};

static inline unsigned short to_bf16(float value)
{
    unsigned bits;
    memcpy(&bits, &value, sizeof bits);
    unsigned rounded = bits + 0x7fff + (bits >> 16 & 1);
    return (unsigned short)(((bits & 0x7fffffff) > 0x7f800000 ? bits | 0x400000 : rounded) >> 16);
}

#define NAME(x) avx2_##x
#define TARGET __attribute__((target("avx2,fma")))
#define V __m256
#define I __m256i
#define LANES 8
#define VECTORS 2
#define TILE_ROWS 6
#define AHEAD 4096
#define LOAD _mm256_loadu_ps
#define STORE _mm256_storeu_ps
#define SPREAD _mm256_set1_ps
#define MULTIPLY_ADD _mm256_fmadd_ps
#define LOAD_PAIRS(p) _mm256_loadu_si256((const __m256i *)(p))
#define SPREAD_PAIR _mm256_set1_epi32
#define EVEN(p) _mm256_castsi256_ps(_mm256_slli_epi32(p, 16))
#define ODD(p) _mm256_castsi256_ps(_mm256_and_si256(p, _mm256_set1_epi32((int)0xffff0000)))
#include "tile.h"

#define NAME(x) avx512_##x
#define TARGET __attribute__((target("avx512f")))
#define V __m512
#define I __m512i
#define LANES 16
#define VECTORS 2
#define TILE_ROWS 12
#define AHEAD 16384
#define LOAD _mm512_loadu_ps
#define STORE _mm512_storeu_ps
#define SPREAD _mm512_set1_ps
#define MULTIPLY_ADD _mm512_fmadd_ps
#define LOAD_PAIRS(p) _mm512_loadu_si512((const void *)(p))
#define SPREAD_PAIR _mm512_set1_epi32
#define EVEN(p) _mm512_castsi512_ps(_mm512_slli_epi32(p, 16))
#define ODD(p) _mm512_castsi512_ps(_mm512_and_si512(p, _mm512_set1_epi32((int)0xffff0000)))
#include "tile.h"

#define NAME(x) avx512_bf16_##x
#define TARGET __attribute__((target("avx512f,avx512bf16")))
#define V __m512
#define I __m512i
#define LANES 16
#define VECTORS 2
#define TILE_ROWS 12
#define AHEAD 16384
#define LOAD _mm512_loadu_ps
#define STORE _mm512_storeu_ps
#define SPREAD _mm512_set1_ps
#define MULTIPLY_ADD _mm512_fmadd_ps
#define LOAD_PAIRS(p) _mm512_loadu_si512((const void *)(p))
#define SPREAD_PAIR _mm512_set1_epi32
#define DOT_PAIRS(sum, a, b) _mm512_dpbf16_ps(sum, (__m512bh)(a), (__m512bh)(b))
#include "tile.h"

struct job {
    const struct product *product;
    const char *x;
    char *y;
    long rows, blocks, step, next;
};

static void work(void *argument)
{
    struct job *job = argument;
    const struct product *p = job->product;
    for (;;) {
        long first = __atomic_fetch_add(&job->next, job->step, __ATOMIC_RELAXED);
        if (first >= job->blocks)
            return;
        for (long block = first; block < first + job->step && block < job->blocks; block++) {
            if (p->level == AVX2)
                avx2_block(p, job->x, job->rows, job->y, block);
            else if (p->level == AVX512)
                avx512_block(p, job->x, job->rows, job->y, block);
            else
                avx512_bf16_block(p, job->x, job->rows, job->y, block);
        }
    }
}

/* The version of the calls below. */
long slipstream_version(void)
{
    return 2;
}

/* The best set of this CPU, `wide` sets only if asked for. */
long slipstream_level(int wide)
{
    __builtin_cpu_init();
    if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma"))
        return NONE;
    if (!wide || !__builtin_cpu_supports("avx512f"))
        return AVX2;
    return __builtin_cpu_supports("avx512bf16") ? AVX512_BF16 : AVX512;
}

/* Output features that lie side by side in the weights. */
long slipstream_width(long level)
{
    return level == AVX2 ? 16 : 32;
}

typedef void parallel(void (*)(void *), void *, unsigned, unsigned);

/* y [rows, features] of x [rows, depth]; `run` is GOMP_parallel of the OpenMP that torch computes with. */
void slipstream_multiply(const struct product *p, const char *x, char *y, long rows, unsigned threads, parallel *run)
{
    long width = slipstream_width(p->level), item = p->kind == FLOATS ? 4 : 2;
    for (long row = 0; row < rows; row += MOST_ROWS) {
        struct job job = {p, x + row * p->depth * 4, y + row * p->features * item, rows - row, 0, 1, 0};
        if (job.rows > MOST_ROWS)
            job.rows = MOST_ROWS;
        job.blocks = (p->features + width - 1) / width;
        if (threads > 1 && job.blocks > 1) {
            job.step = job.blocks / (8 * threads) + 1;
            run(work, &job, threads, 0);
        } else {
            job.step = job.blocks;
            work(&job);
        }
    }
}
static inline float from_bf16(unsigned short value)
{
    unsigned bits = (unsigned)value << 16;
    float number;
    memcpy(&number, &bits, sizeof number);
    return number;
}

/* y [rows, width] = x / sqrt(mean square of the row + epsilon) * weight, in fp32 and rounded once. Squares are added up
 * in NORM_LANES sums side by side: a row's bits do not depend on the others. */
#define NORM_LANES 16
#define NORM(name, T, READ, WRITE)                                                                              \
    __attribute__((target("avx2"))) static void name(const T *x, const float *weight, T *y, long width, float epsilon) \
    {                                                                                                           \
        float sums[NORM_LANES] = {0}, sum = 0;                                                                  \
        long whole = width - width % NORM_LANES;                                                                \
        for (long i = 0; i < whole; i += NORM_LANES)                                                            \
            for (int lane = 0; lane < NORM_LANES; lane++)                                                       \
                sums[lane] += READ(x[i + lane]) * READ(x[i + lane]);                                            \
        for (long i = whole; i < width; i++)                                                                    \
            sums[i - whole] += READ(x[i]) * READ(x[i]);                                                         \
        for (int lane = 0; lane < NORM_LANES; lane++)                                                           \
            sum += sums[lane];                                                                                  \
        float root = _mm_cvtss_f32(_mm_sqrt_ss(_mm_set_ss(sum / (float)width + epsilon)));                      \
        float scale = 1.0f / root;                                                                              \
        for (long i = 0; i < width; i++)                                                                        \
            y[i] = WRITE(READ(x[i]) * scale * weight[i]);                                                       \
    }
NORM(norm_floats, float, , )
NORM(norm_bf16, unsigned short, from_bf16, to_bf16)

void slipstream_rms_norm(const char *x, const float *weight, char *y, long rows, long width, float epsilon, long kind)
{
    for (long row = 0; row < rows; row++) {
        long at = row * width;
        if (kind == FLOATS)
            norm_floats((const float *)x + at, weight, (float *)y + at, width, epsilon);
        else
            norm_bf16((const unsigned short *)x + at, weight, (unsigned short *)y + at, width, epsilon);
    }
}
#else
long slipstream_version(void)
{
    return 0; /* nothing for this CPU */
}
#endif
