/* A tile of a product, for one instruction set (set.h): up to TILE_ROWS rows and WIDTH output features, added up over
 * `depth` input features in their order.
 *
 * Every sum is one chain of fused multiply-adds in the order of the input features, whatever the number of rows. A chain
 * waits for itself at every step, so that few rows take several blocks of features at once. */

#define SIDE(rows) (TILE_ROWS / (rows) < MOST_SIDE ? TILE_ROWS / (rows) : MOST_SIDE)
#define UNROLLED _Pragma("GCC unroll 16")
#define FORGET_LOADS __asm__ volatile("" ::: "memory")

/* Adds to the sums [rows, WIDTH] of each block. x [rows, stride] are floats, or, where pairs are multiplied, pairs of
 * bf16. */
TARGET ALWAYS void NAME(add_up)(const struct steps *s, const char *x, long stride, float *sums, const int rows,
                                const int side, const long kind)
{
    const long line = WIDTH * (kind == BYTES ? 1 : 4);
    const char *w = s->weights, *next = s->next;
    V acc[MOST_SIDE][TILE_ROWS][VECTORS];
    UNROLLED for (int b = 0; b < side; b++)
        UNROLLED for (int r = 0; r < rows; r++)
            UNROLLED for (int v = 0; v < VECTORS; v++)
                acc[b][r][v] = LOAD(sums + b * s->sums_apart + r * WIDTH + v * LANES);
    for (long k = 0; k < s->count; k++, w += line, next += s->share)
        UNROLLED for (int b = 0; b < side; b++) {
            const char *at = w + b * s->apart;
            UNROLLED for (long ask = 0; ask < line; ask += 64)
                __builtin_prefetch(next + b * s->apart + ask, 0, 3);
            if (kind == PAIRS) {
#ifdef DOT_PAIRS
                I both[VECTORS];
                UNROLLED for (int v = 0; v < VECTORS; v++)
                    both[v] = LOAD_PAIRS((const int *)at + v * LANES);
                UNROLLED for (int r = 0; r < rows; r++) {
                    I each = SPREAD_PAIR(((const int *)x)[r * stride + k]);
                    UNROLLED for (int v = 0; v < VECTORS; v++)
                        acc[b][r][v] = DOT_PAIRS(acc[b][r][v], each, both[v]);
                }
#else
                /* With more sums no register is left for pairs and a mask: they are loaded again for their second halves. */
                const int roomy = rows * side * VECTORS <= 8;
                UNROLLED for (int half = 0; half < 2; half++) {
                    V column[VECTORS];
                    UNROLLED for (int v = 0; v < VECTORS; v++) {
                        I both = LOAD_PAIRS((const int *)at + v * LANES);
                        column[v] = !half ? EVEN(both) : roomy ? ODD(both) : ODD_UNMASKED(both);
                    }
                    if (!roomy)
                        FORGET_LOADS;
                    UNROLLED for (int r = 0; r < rows; r++) {
                        V each = SPREAD(((const float *)x)[r * stride + 2 * k + half]);
                        UNROLLED for (int v = 0; v < VECTORS; v++)
                            acc[b][r][v] = MULTIPLY_ADD(each, column[v], acc[b][r][v]);
                    }
                }
#endif
                continue;
            }
            V column[VECTORS];
            UNROLLED for (int v = 0; v < VECTORS; v++)
                column[v] = kind == BYTES ? LOAD_BYTES(at + v * LANES) : LOAD((const float *)at + v * LANES);
            UNROLLED for (int r = 0; r < rows; r++) {
                V each = SPREAD(((const float *)x)[r * stride + k]);
                UNROLLED for (int v = 0; v < VECTORS; v++)
                    acc[b][r][v] = MULTIPLY_ADD(each, column[v], acc[b][r][v]);
            }
        }
    UNROLLED for (int b = 0; b < side; b++)
        UNROLLED for (int r = 0; r < rows; r++)
            UNROLLED for (int v = 0; v < VECTORS; v++)
                STORE(sums + b * s->sums_apart + r * WIDTH + v * LANES, acc[b][r][v]);
}

/* Up to TILE_ROWS rows; `side` is 1, GROUP_SIDE of up to GROUP_ROWS rows, or SIDE(rows). */
TARGET static void NAME(tile)(long kind, const struct steps *s, const char *x, long stride, float *sums, int rows,
                              int side)
{
#define KIND(n, side) \
        if (kind == FLOATS) NAME(add_up)(s, x, stride, sums, n, side, FLOATS); \
        else if (kind == BYTES) NAME(add_up)(s, x, stride, sums, n, side, BYTES); \
        else NAME(add_up)(s, x, stride, sums, n, side, PAIRS)
#define CASE(n) case n: \
        if (side == 1) { KIND(n, 1); } \
        else if (side == GROUP_SIDE && n <= GROUP_ROWS) { KIND(n, GROUP_SIDE); } \
        else { KIND(n, SIDE(n)); } \
        break;
    switch (rows) {
        EACH_COUNT(CASE)
    }
#undef CASE
#undef KIND
}

/* Some steps of narrow weights as floats [input features, WIDTH]. */
TARGET static void NAME(widen)(long kind, const char *w, long count, float *to)
{
    if (kind == BYTES)
        for (long at = 0; at < count * WIDTH; at += LANES)
            STORE(to + at, LOAD_BYTES(w + at));
    else
        for (long k = 0; k < count; k++, to += 2 * WIDTH)
            for (int v = 0; v < VECTORS; v++) {
                I both = LOAD_PAIRS((const int *)w + k * WIDTH + v * LANES);
                STORE(to + v * LANES, EVEN(both));
                STORE(to + WIDTH + v * LANES, ODD(both));
            }
}

/* Adds up blocks for more rows than one tile has: `side` of them, 1 or GROUP_SIDE of floats. A chunk of the weights stays
 * in the first cache for all rows, and the next one is on its way meanwhile. sums [side, rows, WIDTH] */
TARGET static void NAME(chunks)(const struct product *p, const char *w, const char *x, long rows, float *sums, int side)
{
    float wide[CHUNK * WIDTH];
    unsigned short pairs[(CHUNK + 1) * LINE];
    long most = side == 1 ? TILE_ROWS : GROUP_ROWS;
    long groups = (rows + most - 1) / most, each = (rows + groups - 1) / groups;
    int widens = p->floats && p->kind >= LEAST_WIDENED && groups > 2;
    long features = p->kind == PAIRS ? 2 : 1; /* of a step */
    long count = CHUNK / side / (widens ? features : 1), line = WIDTH * (p->kind == BYTES ? 1 : 4);
    long stride = row_length(p), bytes = p->depth * line;
    for (long k = 0; k < p->depth; k += count) {
        long steps = p->depth - k < count ? p->depth - k : count;
        struct steps s = {w + k * line, bytes, steps, w + (k + steps) * line, 0, rows * WIDTH};
        if (p->squeezed) {
            unsqueeze(w, k, steps, pairs);
            s.weights = (const char *)pairs, s.next = w + (k + steps) / GROUP_LINES * GROUP_BYTES;
        }
        if (widens) {
            NAME(widen)(p->kind, s.weights, steps, wide);
            s.weights = (const char *)wide, s.count *= features;
        }
        s.share = (steps * line + groups * s.count - 1) / (groups * s.count);
        for (long row = 0; row < rows; row += each, s.next += s.count * s.share)
            NAME(tile)(widens ? FLOATS : p->kind, &s, x + (row * stride + k * (p->floats ? features : 1)) * 4, stride,
                       sums + row * WIDTH, (int)(rows - row < each ? rows - row : each), side);
    }
}

#ifdef SQUEEZED_PAIRS
/* As add_up, an even number of lines of groups that have tables: weights are unsqueezed in registers. */
TARGET ALWAYS void NAME(add_up_squeezed)(const struct steps *s, const char *x, long stride, float *sums, const int rows,
                                         const int side)
{
    V acc[MOST_SIDE][TILE_ROWS][VECTORS];
    __m512i high[MOST_SIDE], low[MOST_SIDE];
    UNROLLED for (int b = 0; b < side; b++) {
        const struct group_head *head = (const struct group_head *)(s->weights + b * s->apart);
        high[b] = spread(head->high), low[b] = spread(head->low);
        UNROLLED for (int r = 0; r < rows; r++)
            UNROLLED for (int v = 0; v < VECTORS; v++)
                acc[b][r][v] = LOAD(sums + b * s->sums_apart + r * WIDTH + v * LANES);
    }
    const char *w = s->weights + sizeof(struct group_head);
    for (long k = 0; k < s->count; k += 2, w += TWO_LINES)
        UNROLLED for (int b = 0; b < side; b++) {
            const char *at = w + b * s->apart;
            UNROLLED for (long ask = 0; ask < TWO_LINES; ask += 64)
                __builtin_prefetch(at + s->share + ask, 0, 3);
            __m512i numbers = _mm512_loadu_si512(at + 2 * LINE);
            UNROLLED for (int line = 0; line < 2; line++) {
                __m512i both[2];
                unsqueeze_line(at + line * LINE, line ? _mm512_srli_epi16(numbers, 4) : numbers, high[b], low[b], both);
                UNROLLED for (int r = 0; r < rows; r++) {
                    I each = SPREAD_PAIR(((const int *)x)[r * stride + k + line]);
                    UNROLLED for (int v = 0; v < VECTORS; v++)
                        acc[b][r][v] = DOT_PAIRS(acc[b][r][v], each, both[v]);
                }
            }
        }
    UNROLLED for (int b = 0; b < side; b++)
        UNROLLED for (int r = 0; r < rows; r++)
            UNROLLED for (int v = 0; v < VECTORS; v++)
                STORE(sums + b * s->sums_apart + r * WIDTH + v * LANES, acc[b][r][v]);
}

/* Whether the group of each block could be added up so, and was. */
TARGET static int NAME(tile_squeezed)(const struct steps *s, const char *x, long stride, float *sums, int rows, int side)
{
    if (s->count % 2)
        return 0;
    for (int b = 0; b < side; b++)
        if (((const struct group_head *)(s->weights + b * s->apart))->raw)
            return 0;
#define CASE(n) case n: \
        if (side == 1) \
            NAME(add_up_squeezed)(s, x, stride, sums, n, 1); \
        else \
            NAME(add_up_squeezed)(s, x, stride, sums, n, SIDE(n)); \
        break;
    switch (rows) {
        EACH_COUNT(CASE)
    }
#undef CASE
    return 1;
}
#endif

/* Adds up `side` blocks of squeezed weights for few rows, a group of lines at a time: they stay in the first cache. */
TARGET static void NAME(groups)(const struct product *p, const char *w, const char *x, long rows, float *sums, int side)
{
    unsigned short pairs[MOST_SIDE][(GROUP_LINES + 1) * LINE];
    long bytes = squeezed_bytes(p->depth);
    for (long k = 0; k < p->depth; k += GROUP_LINES) {
        long count = p->depth - k < GROUP_LINES ? p->depth - k : GROUP_LINES;
        const char *from = x + k * 4;
#ifdef SQUEEZED_PAIRS
        struct steps as_they_are = {w + k / GROUP_LINES * GROUP_BYTES, bytes, count, 0, AHEAD / side, rows * WIDTH};
        if (NAME(tile_squeezed)(&as_they_are, from, row_length(p), sums, (int)rows, side))
            continue;
#endif
        for (int b = 0; b < side; b++)
            unsqueeze(w + b * bytes, k, count, pairs[b]);
        struct steps s = {(const char *)pairs, sizeof pairs[0], count, (const char *)pairs, 0, rows * WIDTH};
        NAME(tile)(PAIRS, &s, from, row_length(p), sums, (int)rows, side);
    }
}

/* Writes the features of one block from its sums [rows, WIDTH]. */
TARGET static void NAME(finish)(const struct product *p, long rows, char *y, long block, float *sums)
{
    long first = block * WIDTH, count = p->features - first < WIDTH ? p->features - first : WIDTH;
    for (long row = 0; row < rows; row++) {
        float *sum = sums + row * WIDTH;
        if (p->scales)
            for (long i = 0; i < count; i++)
                sum[i] *= p->scales[first + i];
        if (p->bias)
            for (long i = 0; i < count; i++)
                sum[i] += p->bias[first + i];
        long at = row * p->features + first;
        if (p->result == FLOATS)
            memcpy((float *)y + at, sum, count * sizeof(float));
        else
            for (long i = 0; i < count; i++)
                ((unsigned short *)y)[at + i] = to_bf16(sum[i]);
    }
}

/* All rows of the blocks first .. end-1. */
TARGET static void NAME(blocks)(const struct product *p, const char *x, long rows, char *y, long first, long end)
{
    float sums[GROUP_SIDE * MOST_ROWS * WIDTH];
    long line = WIDTH * (p->kind == BYTES ? 1 : 4), bytes = p->squeezed ? squeezed_bytes(p->depth) : p->depth * line;
    int few = rows <= (p->kind == FLOATS ? GROUP_ROWS : TILE_ROWS);
    long wanted = few ? SIDE(rows) : p->kind == FLOATS && rows <= GROUPS * GROUP_ROWS ? GROUP_SIDE : 1;
    for (long block = first, side; block < end; block += side) {
        const char *w = (const char *)p->weights + block * bytes;
        side = end - block >= wanted ? wanted : 1;
        for (long b = 0; b < side; b++)
            memset(sums + b * rows * WIDTH, 0, rows * WIDTH * sizeof(float));
        if (!few) {
            NAME(chunks)(p, w, x, rows, sums, (int)side);
        } else if (p->squeezed) {
            NAME(groups)(p, w, x, rows, sums, (int)side);
        } else {
            struct steps s = {w, bytes, p->depth, w + AHEAD / side, line, rows * WIDTH};
            NAME(tile)(p->kind, &s, x, row_length(p), sums, (int)rows, (int)side);
        }
        for (long b = 0; b < side; b++)
            NAME(finish)(p, rows, y, block + b, sums + b * rows * WIDTH);
    }
}
