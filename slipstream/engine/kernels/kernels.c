/* Products of few rows and large weights on x86-64, at the speed at which memory delivers the weights; norms of rows;
 * attention to paged keys and values; the layers of a decoder that are made of them; the likeliest of logits, and which may
 * be drawn.
 *
 * A row's sums are added up in one order: they depend neither on the other rows nor on the number of threads. In fp32
 * they are the same on all CPUs with FMA. With bf16 weights products are exact and sums are fp32; CPUs with AVX512-BF16
 * add them up in pairs, and are the same among themselves.
 *
 * Compiled with the package where there is a C compiler; slipstream/engine/kernels/compiled.py opens it. */

#if defined(__x86_64__) && defined(__GNUC__)
#include <immintrin.h>
#include <math.h>
#include <string.h>
#include <time.h>

enum { FLOATS = 0, PAIRS = 1, BYTES = 2 };
enum { NONE = 0, AVX2 = 1, AVX512 = 2, AVX512_BF16 = 3 };
#define MOST_ROWS 384
#define CHUNK 128   /* input features whose weights stay in the first cache for all rows, of all blocks side by side */
#define GROUPS 3    /* of rows at most, where a group takes blocks side by side */
#define MOST_SIDE 4 /* blocks of output features that few rows take at once */
#define MOST_FEW 12 /* such rows, with any set of instructions */
#define BLOCK 128 /* positions whose keys are added up at a time */
#define SUMS 16
#define MOST_QUERIES 96 /* rows of a part */
#define MOST_DIM 512    /* of a head; a multiple of 16 */
#define MOST_TAIL 384   /* keys of a block, and candidates */

struct product {
    const void *weights; /* [features / width, depth, width], features filled up with zeros */
    const float *bias;   /* [features], or null */
    const float *scales; /* [features] of weights that are bytes, or null */
    long features;
    long depth;  /* input features; pairs of them in bf16 */
    long kind;   /* of the weights; bytes are multiplied with floats */
    long result; /* kind of the result */
    long level;
    long floats; /* 1: rows are floats, whatever the result is */
    long squeezed; /* 1: weights are pairs as squeeze.h has them, and rows are pairs */
};

/* Some steps through the weights of blocks side by side: an input feature each, or two. */
struct steps {
    const char *weights;
    long apart, count; /* bytes from block to block */
    const char *next;  /* what memory is asked for meanwhile: `share` bytes a step, in every block */
    long share;
    long sums_apart; /* floats from a block's sums to the next one's */
};

/* Keys and values of one layer: they lie in pools, a head's numbers side by side; strides in bytes. */
struct layer {
    char *keys, *values;
    long key_row, key_head, value_row, value_head;
    long heads, group; /* query heads of one KV head */
    long key_dim, value_dim;
    long kind, level;
    long window; /* positions that a row sees, its own included; 0: all */
    float scale, softcap; /* scores are cut softly at +-softcap; 0: not */
    const float *sinks;   /* [heads * group]: scores of keys without values (gpt-oss), or null */
};

/* Some tokens of one session in a pass. Its keys have slots: those of the text in the order of positions up to `base`,
 * then its `pending` tokens and the candidates below the last of them. */
struct part {
    long row;   /* of the pass: the part's first token */
    long first; /* number of that token, counted from the session's first pending one */
    long count;
    long base, pending;
    long start;          /* the pool row of slot 0, if rows follow each other */
    const long *slots;   /* else the pool row of every slot */
    const long *parents; /* of the session's candidates: -1 is the last pending token */
};

/* What a pass computes in one layer; strides in bytes. */
struct call {
    const char *query, *key, *value;
    char *out; /* [tokens, heads * group, value_dim] */
    long query_token, query_head, key_token, key_head, value_token, value_head;
};

/* Input features. */
static inline long inputs(const struct product *p)
{
    return p->depth * (p->kind == PAIRS ? 2 : 1);
}

/* Floats, or pairs of bf16, of a row. */
static inline long row_length(const struct product *p)
{
    return p->floats ? inputs(p) : p->depth;
}

static inline long item(long kind)
{
    return kind == FLOATS ? 4 : 2;
}

static inline long pool_row(const struct part *p, long slot)
{
    return p->slots ? p->slots[slot] : p->start + slot;
}

/* Where the heads of `count` keys or values from the slot `first` on stand. */
static void find_rows(const struct part *p, const char *heads, long stride, long first, long count, const char **found)
{
    for (long j = 0; j < count; j++)
        found[j] = heads + pool_row(p, first + j) * stride;
}

/* The block of keys with which a part begins, of one head. Returns how many there are. */
static long find_first_keys(const struct layer *a, const struct part *p, long head, const char **found)
{
    long last = p->base + (p->first < p->pending ? p->first : p->pending - 1);
    long start = a->window && last + 1 > a->window ? last + 1 - a->window : 0, count = last + 1 - start / BLOCK * BLOCK;
    count = count < BLOCK ? count : BLOCK;
    find_rows(p, a->keys + head * a->key_head, a->key_row, start / BLOCK * BLOCK, count, found);
    return count;
}

/* Rows of a pool that are read soon: they lie too far apart for the processor to foresee. Memory is asked for a few of them
 * at a time, beside computing: a core has some two dozen requests under way, and waits where it asks for more. */
struct wanted {
    const char **rows;
    long count, bytes; /* of a row */
};

static inline __attribute__((always_inline)) void ask(struct wanted *w, long count)
{
    for (; count > 0 && w->count > 0; count--, w->rows++, w->count--)
        for (long at = 0; at < w->bytes; at += 64)
            __builtin_prefetch(*w->rows + at, 0, 3);
}

/* One row's softmax so far. */
struct softmax {
    float most;       /* the largest score; -inf before the first key */
    float sums[SUMS]; /* of exp(score - most), by the position's remainder */
};

static inline unsigned short to_bf16(float value)
{
    unsigned bits;
    memcpy(&bits, &value, sizeof bits);
    unsigned rounded = bits + 0x7fff + (bits >> 16 & 1);
    return (unsigned short)(((bits & 0x7fffffff) > 0x7f800000 ? bits | 0x400000 : rounded) >> 16);
}

static inline float from_bf16(unsigned short value)
{
    unsigned bits = (unsigned)value << 16;
    float number;
    memcpy(&number, &bits, sizeof number);
    return number;
}

/* exp(x) of -87 to 88, to which numbers are cut, within 2 units in the last place: Cody and Waite's reduction, and the
 * polynomial of Cephes. */
static inline __attribute__((always_inline)) float exponential(float x)
{
    x = x < -87.0f ? -87.0f : x;
    x = x > 88.0f ? 88.0f : x;
    union { float number; unsigned bits; } power = {__builtin_fmaf(x, 1.44269504088896341f, 12582912.0f)};
    float whole = power.number - 12582912.0f, r = __builtin_fmaf(whole, -0.693359375f, x), z = 1.9875691500e-4f;
    r = __builtin_fmaf(whole, 2.12194440e-4f, r);
    z = __builtin_fmaf(z, r, 1.3981999507e-3f);
    z = __builtin_fmaf(z, r, 8.3334519073e-3f);
    z = __builtin_fmaf(z, r, 4.1665795894e-2f);
    z = __builtin_fmaf(z, r, 1.6666665459e-1f);
    z = __builtin_fmaf(z, r, 5.0000001201e-1f);
    z = __builtin_fmaf(z, r * r, r) + 1.0f;
    power.bits = (power.bits + 127u) << 23;
    return z * power.number;
}

/* Places of a and b, [32] numbers each, where the pairs of their first halves stand, and of their second halves. */
static const unsigned short PAIRED_UP[2][32] = {
    {0, 32, 1, 33, 2, 34, 3, 35, 4, 36, 5, 37, 6, 38, 7, 39, 8, 40, 9, 41, 10, 42, 11, 43, 12, 44, 13, 45, 14, 46, 15, 47},
    {16, 48, 17, 49, 18, 50, 19, 51, 20, 52, 21, 53, 22, 54, 23, 55,
     24, 56, 25, 57, 26, 58, 27, 59, 28, 60, 29, 61, 30, 62, 31, 63},
};

#include "squeeze.h"

#define NAME(x) avx2_##x
#define TARGET __attribute__((target("avx2,fma")))
#define V __m256
#define I __m256i
#define LANES 8
#define VECTORS 2
#define TILE_ROWS 6
#define GROUP_ROWS 3
#define GROUP_SIDE 2
#define AHEAD 2048
#define LEAST_WIDENED BYTES /* pairs are taken apart for six rows as fast as floats are read */
#define LOAD _mm256_loadu_ps
#define STORE _mm256_storeu_ps
#define SPREAD _mm256_set1_ps
#define MULTIPLY_ADD _mm256_fmadd_ps
#define LARGER _mm256_max_ps
#define LOAD_PAIRS(p) _mm256_loadu_si256((const __m256i *)(p))
#define LOAD_HALVES(p) _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)(p))), 16))
#define SPREAD_PAIR _mm256_set1_epi32
#define LOAD_BYTES(p) _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)(p))))
#define EVEN(p) _mm256_castsi256_ps(_mm256_slli_epi32(p, 16))
#define ODD(p) _mm256_castsi256_ps(_mm256_and_si256(p, _mm256_set1_epi32((int)0xffff0000)))
#define ODD_UNMASKED(p) _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_srli_epi32(p, 16), 16))
#include "set.h"

#define NAME(x) avx512_##x
#define TARGET __attribute__((target("avx512f,fma")))
#include "avx512.h"

#define NAME(x) avx512_bf16_##x
#define TARGET __attribute__((target("avx512f,avx512bw,avx512bf16,fma")))
#ifndef WIDE_VECTORS
#define SQUEEZED_PAIRS
#endif
#define DOT_PAIRS(sum, a, b) _mm512_dpbf16_ps(sum, (__m512bh)(a), (__m512bh)(b))
#include "avx512.h"

#include "stages.h"

/* Rows of a product, to be divided by blocks of features. */
struct rows_of_product {
    const struct product *product;
    const char *x;
    char *y;
    long rows;
};

static void multiply_blocks(const void *what, long first, long end)
{
    const struct rows_of_product *job = what;
    const struct product *p = job->product;
    for (long row = 0; row < job->rows; row += MOST_ROWS) {
        long rows = job->rows - row < MOST_ROWS ? job->rows - row : MOST_ROWS;
        const char *x = job->x + row * row_length(p) * 4;
        char *y = job->y + row * p->features * item(p->result);
        if (p->level == AVX2)
            avx2_blocks(p, x, rows, y, first, end);
        else if (p->level == AVX512)
            avx512_blocks(p, x, rows, y, first, end);
        else
            avx512_bf16_blocks(p, x, rows, y, first, end);
    }
}

/* The version of the calls below. */
long slipstream_version(void)
{
    return 13;
}

/* The best set of this CPU, `wide` sets only if asked for. Intel's CPUs take four times as long for a product of pairs as
 * for one of floats (0.74 and 0.18 ns on a Xeon), for half as many: weights become floats there. */
long slipstream_level(int wide)
{
    __builtin_cpu_init();
    if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma"))
        return NONE;
    if (!wide || !__builtin_cpu_supports("avx512f"))
        return AVX2;
    int pairs = __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512bw");
    return pairs && !__builtin_cpu_is("intel") ? AVX512_BF16 : AVX512;
}

/* Output features that lie side by side in the weights. */
long slipstream_width(long level)
{
    return level == AVX2 ? 16 : 32;
}

static long blocks_of(const struct product *p)
{
    long width = slipstream_width(p->level);
    return (p->features + width - 1) / width;
}

/* Blocks that a thread takes at least: few rows take them side by side. Of many rows one is work enough, and threads end
 * together. */
static long least_blocks(long rows)
{
    return rows > MOST_FEW ? 1 : MOST_SIDE;
}

/* y [rows, features] of x [rows, depth]. One thread does `few` multiplications before others have woken up; `run` is
 * GOMP_parallel of the OpenMP that torch computes with. */
void slipstream_multiply(const struct product *p, const char *x, char *y, long rows, long few, unsigned threads,
                         parallel *run)
{
    struct rows_of_product job = {p, x, y, rows};
    if (rows * p->features * inputs(p) <= few)
        threads = 1;
    divide(multiply_blocks, &job, blocks_of(p), least_blocks(rows), threads, run);
}

/* Parts of a step, to be divided by part and KV head; the longest come first, so that threads end together. */
struct parts_of_step {
    const struct layer *layer;
    const struct call *call;
    const struct part *parts;
    long count;
    struct stage *stage;
};

static void attend_head(const void *what, long item, long following)
{
    const struct parts_of_step *job = what;
    const struct layer *layer = job->layer;
    const struct part *part = job->parts + item / layer->heads;
    const struct part *next = following < job->count * layer->heads ? job->parts + following / layer->heads : 0;
    if (layer->level == AVX2)
        avx2_attend(layer, job->call, part, item % layer->heads, next, following % layer->heads);
    else if (layer->level == AVX512_BF16 && layer->kind == PAIRS)
        avx512_bf16_attend(layer, job->call, part, item % layer->heads, next, following % layer->heads);
    else
        avx512_attend(layer, job->call, part, item % layer->heads, next, following % layer->heads);
}

static void attend_parts(void *argument)
{
    const struct parts_of_step *job = argument;
    take_in_turn(job->stage, attend_head, job, job->count * job->layer->heads);
}

/* Copies a token's heads of keys or values, `from_head` bytes from each other, to a row of their pool. */
static void write_row(char *row, long to_head, const char *from, long from_head, long heads, long bytes)
{
    for (long h = 0; h < heads; h++)
        memcpy(row + h * to_head, from + h * from_head, bytes);
}

/* Writes the keys and values of `tokens` tokens to the pool rows `written`, if it is not null, then lets every part's tokens
 * see theirs. */
void slipstream_attend(const struct layer *a, const struct call *c, const struct part *parts, long count,
                       const long *written, long tokens, long few, unsigned threads, parallel *run)
{
    long key = a->key_dim * item(a->kind), value = a->value_dim * item(a->kind), pairs = 0;
    for (long t = 0; written && t < tokens; t++) {
        write_row(a->keys + written[t] * a->key_row, a->key_head, c->key + t * c->key_token, c->key_head, a->heads, key);
        write_row(a->values + written[t] * a->value_row, a->value_head, c->value + t * c->value_token, c->value_head,
                  a->heads, value);
    }
    for (long i = 0; i < count; i++) /* tokens times keys */
        pairs += parts[i].count * (parts[i].base + parts[i].first + parts[i].count);
    struct stage stage = {0};
    struct parts_of_step job = {a, c, parts, count, &stage};
    if (threads > 1 && pairs * a->heads * a->group * (a->key_dim + a->value_dim) > few)
        run(attend_parts, &job, threads, 0);
    else
        attend_parts(&job);
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

static void norm(long kind, const float *weight, float epsilon, const char *x, char *y, long width)
{
    if (kind == FLOATS)
        norm_floats((const float *)x, weight, (float *)y, width, epsilon);
    else
        norm_bf16((const unsigned short *)x, weight, (unsigned short *)y, width, epsilon);
}

void slipstream_rms_norm(const char *x, const float *weight, char *y, long rows, long width, float epsilon, long kind)
{
    for (long at = 0; at < rows * width * item(kind); at += width * item(kind))
        norm(kind, weight, epsilon, x + at, y + at, width);
}

#include "activations.h"
#include "decoder.h"
#include "ranking.h"
#include "race.h"
#else
long slipstream_version(void)
{
    return 0; /* nothing for this CPU */
}
#endif
