/* The operations of AVX-512 in plain C, for CPUs that have no AVX-512: tests compile them in. A product of
 * pairs is added up number by number, which AVX512-BF16 does in its own order. */

#ifndef EMULATED
#define EMULATED
typedef float floats16 __attribute__((vector_size(64), aligned(4)));
typedef int ints16 __attribute__((vector_size(64), aligned(4)));
#define INLINE static inline __attribute__((always_inline, target("avx2,fma")))
#define EACH for (int i = 0; i < 16; i++)

INLINE floats16 load16(const float *p) { floats16 v; memcpy(&v, p, 64); return v; }
INLINE void store16(float *p, floats16 v) { memcpy(p, &v, 64); }
INLINE floats16 spread16(float x) { floats16 v; EACH v[i] = x; return v; }
INLINE floats16 multiply_add16(floats16 a, floats16 b, floats16 c)
{
    floats16 v;
    EACH v[i] = __builtin_fmaf(a[i], b[i], c[i]);
    return v;
}
INLINE floats16 larger16(floats16 a, floats16 b) { floats16 v; EACH v[i] = a[i] > b[i] ? a[i] : b[i]; return v; }
INLINE ints16 load_pairs16(const void *p) { ints16 v; memcpy(&v, p, 64); return v; }
INLINE floats16 load_halves16(const unsigned short *p)
{
    ints16 high;
    floats16 v;
    EACH high[i] = p[i] << 16;
    memcpy(&v, &high, 64);
    return v;
}
INLINE ints16 pair_up16(ints16 a, ints16 b, int half)
{
    ints16 v;
    EACH {
        unsigned short first, second;
        memcpy(&first, (char *)&a + 32 * half + 2 * i, 2);
        memcpy(&second, (char *)&b + 32 * half + 2 * i, 2);
        v[i] = (int)(first | (unsigned)second << 16);
    }
    return v;
}
INLINE ints16 spread_pair16(int x) { ints16 v; EACH v[i] = x; return v; }
INLINE floats16 load_bytes16(const char *p) { floats16 v; EACH v[i] = (signed char)p[i]; return v; }
INLINE floats16 even16(ints16 p) { ints16 high = p << 16; floats16 v; memcpy(&v, &high, 64); return v; }
INLINE floats16 odd16(ints16 p) { ints16 high = p & (int)0xffff0000; floats16 v; memcpy(&v, &high, 64); return v; }
INLINE floats16 dot16(floats16 sum, ints16 a, ints16 b)
{
    return multiply_add16(odd16(a), odd16(b), multiply_add16(even16(a), even16(b), sum));
}
#endif

#undef TARGET
#define TARGET __attribute__((target("avx2,fma")))
#ifdef DOT_PAIRS
#undef DOT_PAIRS
#define DOT_PAIRS dot16
#endif
#define V floats16
#define I ints16
#define LOAD load16
#define STORE store16
#define SPREAD spread16
#define MULTIPLY_ADD multiply_add16
#define LARGER larger16
#define LOAD_PAIRS load_pairs16
#define LOAD_HALVES load_halves16
#define SPREAD_PAIR spread_pair16
#define PAIR_UP pair_up16
#define LOAD_BYTES load_bytes16
#define EVEN even16
#define ODD odd16
