/* Functions of single numbers, in fp32 and rounded once. Torch computes the last numbers of an array, and of each thread's
 * part, by other instructions than the ones before them: there a number's bits depend on how many rows there are. */

enum { SILU = 0, SIGMOID = 1, TANH = 2, GELU = 3, GELU_TANH = 4, GELU_SIGMOID = 5 };
#define AT_ONCE 4096 /* numbers that a thread takes at least */

static inline __attribute__((always_inline)) float logistic(float x)
{
    return 1.0f / (1.0f + exponential(-x));
}

/* erf within 2e-7: Abramowitz and Stegun, 7.1.26. */
static inline __attribute__((always_inline)) float error_function(float x)
{
    float size = x < 0 ? -x : x, t = 1.0f / __builtin_fmaf(0.3275911f, size, 1.0f), p = 1.061405429f;
    p = __builtin_fmaf(p, t, -1.453152027f);
    p = __builtin_fmaf(p, t, 1.421413741f);
    p = __builtin_fmaf(p, t, -0.284496736f);
    p = __builtin_fmaf(p, t, 0.254829592f);
    float y = 1.0f - p * t * exponential(-size * size);
    return x < 0 ? -y : y;
}

static inline __attribute__((always_inline)) float activation(const long which, float x)
{
    switch (which) {
    case SILU:
        return x * logistic(x);
    case SIGMOID:
        return logistic(x);
    case TANH: {
        float e = exponential(x < 0 ? 2.0f * x : -2.0f * x), y = (1.0f - e) / (1.0f + e);
        return x < 0 ? -y : y;
    }
    case GELU:
        return 0.5f * x * (1.0f + error_function(x * 0.70710678118654752f));
    case GELU_TANH:
        return x * logistic(1.5957691216057308f * __builtin_fmaf(0.044715f * x * x, x, x));
    default:
        return x * logistic(1.702f * x);
    }
}

struct numbers_of_function {
    const char *x;
    char *y;
    long count, kind;
};

#define ACTIVATE(which)                                                                                       \
    __attribute__((target("avx2,fma"))) static void activate_##which(const void *what, long first, long end)  \
    {                                                                                                         \
        const struct numbers_of_function *n = what;                                                           \
        long to = end * AT_ONCE < n->count ? end * AT_ONCE : n->count;                                        \
        if (n->kind == FLOATS)                                                                                \
            for (long i = first * AT_ONCE; i < to; i++)                                                       \
                ((float *)n->y)[i] = activation(which, ((const float *)n->x)[i]);                             \
        else                                                                                                  \
            for (long i = first * AT_ONCE; i < to; i++)                                                       \
                ((unsigned short *)n->y)[i] = to_bf16(activation(which, from_bf16(((const unsigned short *)n->x)[i]))); \
    }
ACTIVATE(SILU)
ACTIVATE(SIGMOID)
ACTIVATE(TANH)
ACTIVATE(GELU)
ACTIVATE(GELU_TANH)
ACTIVATE(GELU_SIGMOID)

/* y = function(x), `count` numbers of a kind. */
void slipstream_activate(long which, const char *x, char *y, long count, long kind, long few, unsigned threads, parallel *run)
{
    static each *const each_of[] = {activate_SILU, activate_SIGMOID, activate_TANH,
                                    activate_GELU, activate_GELU_TANH, activate_GELU_SIGMOID};
    struct numbers_of_function job = {x, y, count, kind};
    divide(each_of[which], &job, (count + AT_ONCE - 1) / AT_ONCE, 1, count * 16 <= few ? 1 : threads, run);
}
