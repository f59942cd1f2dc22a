/* Which tokens may win an exponential race (slipstream/engine/sampler/coupled_sampling.py): all others are ruled out, so
 * that the exact score is computed for a few. */

#define DRAWS 512 /* at a time: their 64-bit states stay in the first cache */
#define MISSING_ONE 4294967296.0 /* 1 - U is counted in units of 2^-32 */

/* Puts (1 - U) of the draw of each token, in units of 2^-32, into `to`; the noise is SplitMix64 of the key and the token
 * (slipstream/speculation/noise.py). */
WIDE static void missing(unsigned long long key, long first, long count, float *to)
{
    unsigned long long state[DRAWS];
    for (long i = 0; i < count; i++) {
        unsigned long long z = key + (unsigned long long)(first + i + 1) * 0x9E3779B97F4A7C15ULL;
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ULL;
        z = (z ^ (z >> 27)) * 0x94D049BB133111EBULL;
        state[i] = ((z ^ (z >> 31)) >> 32) ^ 0xffffffffULL;
    }
    for (long i = 0; i < count; i++) { /* by halves: there is no vector instruction for unsigned numbers */
        int high = (int)(state[i] >> 16), low = (int)(state[i] & 0xffff);
        to[i] = (float)high * 65536.0f + (float)low + 0.5f;
    }
}

/* The true time of the winner of the cheap race is at most this; a little more for rounding. */
static float bar(float leading)
{
    double part = leading / MISSING_ONE, least = 0.5 / MISSING_ONE;
    part = part < least ? least : part > 1.0 - least ? 1.0 - least : part;
    return (float)(leading * (-log1p(-part) / part) * 1.001);
}

/* Tokens of one row of logits, the row's maximum taken off, whose cheap time (1 - U) / p is within the bar. Returns their
 * number, or -1 where there are more than `room`; 0 for a row of NaN. times [width] */
WIDE static long contend(const float *shifted, long width, unsigned long long key, float *times, long *tokens, long room)
{
    float least[SUMS], leading = INFINITY;
    for (int lane = 0; lane < SUMS; lane++)
        least[lane] = INFINITY;
    for (long first = 0; first < width; first += DRAWS) {
        long count = width - first < DRAWS ? width - first : DRAWS, whole = count - count % SUMS;
        float *x = times + first;
        missing(key, first, count, x);
        for (long i = 0; i < count; i++)
            x[i] /= exponential(shifted[first + i]);
        for (long i = 0; i < whole; i += SUMS)
            for (int lane = 0; lane < SUMS; lane++)
                least[lane] = x[i + lane] < least[lane] ? x[i + lane] : least[lane];
        for (long i = whole; i < count; i++)
            leading = x[i] < leading ? x[i] : leading;
    }
    for (int lane = 0; lane < SUMS; lane++)
        leading = least[lane] < leading ? least[lane] : leading;
    long found = 0;
    __m256 bound = _mm256_set1_ps(bar(leading));
    for (long i = 0; i < width; i += 8) {
        int some = 0xff;
        if (i + 8 <= width)
            some = _mm256_movemask_ps(_mm256_cmp_ps(_mm256_loadu_ps(times + i), bound, _CMP_LE_OQ));
        for (; some; some &= some - 1) {
            long at = i + __builtin_ctz(some);
            if (at >= width || !(times[at] <= bar(leading)))
                continue;
            if (found == room)
                return -1;
            tokens[found++] = at;
        }
    }
    return found;
}

/* Of rows [rows, width] with the keys of their draws: rows and tokens of those that may win, row by row. Returns their
 * number, or -1 where there are more than `room`. */
long slipstream_contend(const float *shifted, long rows, long width, const unsigned long long *keys, float *times,
                        long *row_of, long *tokens, long room)
{
    long found = 0;
    for (long row = 0; row < rows; row++) {
        long more = contend(shifted + row * width, width, keys[row], times, tokens + found, room - found);
        if (more < 0)
            return -1;
        for (long i = 0; i < more; i++)
            row_of[found + i] = row;
        found += more;
    }
    return found;
}
