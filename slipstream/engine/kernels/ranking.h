/* The likeliest tokens of rows of logits, in fp32. */

#define MOST_RANKS 64

/* Puts x before the smaller ones of the `found` best so far, of which `count` are kept; behind equal ones. */
static long insert(float x, long token, float *best, long *tokens, long found, long count)
{
    long at = found < count ? found : count - 1;
    for (; at > 0 && best[at - 1] < x; at--)
        best[at] = best[at - 1], tokens[at] = tokens[at - 1];
    best[at] = x, tokens[at] = token;
    return found < count ? found + 1 : count;
}

/* The `count` largest of x [width], best first, and log softmax of `sharpness` times x there; token -1 and -inf where
 * fewer are above -inf, and everywhere in a row with NaN or +inf. */
__attribute__((target("avx2,fma"))) static void rank_row(const float *x, long width, long count, float sharpness,
                                                         long *tokens, float *confidences)
{
    float best[MOST_RANKS], sums[SUMS] = {0}, sum = 0.0f;
    long found = 0, whole = width - width % SUMS, broken = 0;
    for (long i = 0; i < width; i += 8) {
        int some = 0xff;
        if (i + 8 <= width) { /* larger than the last one kept, or NaN */
            __m256 bar = _mm256_set1_ps(found < count ? -INFINITY : best[count - 1]);
            some = _mm256_movemask_ps(_mm256_cmp_ps(_mm256_loadu_ps(x + i), bar, _CMP_NLE_UQ));
        }
        for (; some; some &= some - 1) {
            long at = i + __builtin_ctz(some);
            if (at >= width)
                break;
            broken |= x[at] != x[at] || x[at] == INFINITY;
            if (x[at] > (found < count ? -INFINITY : best[count - 1]))
                found = insert(x[at], at, best, tokens, found, count);
        }
    }
    if (broken)
        found = 0;
    for (long i = 0; found && i < whole; i += SUMS)
        for (int lane = 0; lane < SUMS; lane++)
            sums[lane] += exponential((x[i + lane] - best[0]) * sharpness);
    for (long i = whole; found && i < width; i++)
        sums[i - whole] += exponential((x[i] - best[0]) * sharpness);
    for (int lane = 0; lane < SUMS; lane++)
        sum += sums[lane];
    for (long i = 0; i < count; i++) {
        float confidence = i < found ? (best[i] - best[0]) * sharpness - logf(sum) : -INFINITY;
        tokens[i] = confidence > -INFINITY ? tokens[i] : -1;
        confidences[i] = confidence < 0.0f ? confidence : 0.0f;
    }
}

/* Of each row of logits [rows, width]: tokens and confidences [rows, count], count at most MOST_RANKS. */
void slipstream_rank(const float *logits, long rows, long width, long count, float sharpness, long *tokens,
                     float *confidences)
{
    for (long row = 0; row < rows; row++)
        rank_row(logits + row * width, width, count, sharpness, tokens + row * count, confidences + row * count);
}
