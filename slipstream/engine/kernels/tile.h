/* A tile of a product, for one instruction set (set.h): up to TILE_ROWS rows and WIDTH output features, added up over
 * `depth` input features in their order.
 *
 * Every sum is one chain of fused multiply-adds in the order of the input features, whatever the number of rows. */

/* A row of weights that is AHEAD bytes away. Memory goes on while rows are multiplied; there is no fault at the end. */
#define PREFETCH(w)                                \
    for (int line = 0; line < WIDTH; line += 16)   \
    __builtin_prefetch((const char *)(w) + AHEAD + 4 * line, 0, 3)

/* x [rows, stride], w [depth, WIDTH] of floats or bytes, sums [rows, WIDTH] */
TARGET ALWAYS void NAME(floats)(const float *x, long stride, const char *w, long depth, float *sums, const int rows,
                                const long kind)
{
    V acc[TILE_ROWS][VECTORS];
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < VECTORS; v++)
            acc[r][v] = LOAD(sums + r * WIDTH + v * LANES);
    for (long k = 0; k < depth; k++, w += WIDTH * (kind == BYTES ? 1 : 4)) {
        if (kind == BYTES)
            __builtin_prefetch(w + AHEAD, 0, 3);
        else
            PREFETCH(w);
        V column[VECTORS];
        for (int v = 0; v < VECTORS; v++)
            column[v] = kind == BYTES ? LOAD_BYTES(w + v * LANES) : LOAD((const float *)w + v * LANES);
        for (int r = 0; r < rows; r++) {
            V each = SPREAD(x[r * stride + k]);
            for (int v = 0; v < VECTORS; v++)
                acc[r][v] = MULTIPLY_ADD(each, column[v], acc[r][v]);
        }
    }
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < VECTORS; v++)
            STORE(sums + r * WIDTH + v * LANES, acc[r][v]);
}

/* x [rows, stride] and w [depth, WIDTH] hold pairs of bf16: the input features 2k and 2k+1. */
TARGET ALWAYS void NAME(pairs)(const int *x, long stride, const int *w, long depth, float *sums, const int rows)
{
    V acc[TILE_ROWS][VECTORS];
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < VECTORS; v++)
            acc[r][v] = LOAD(sums + r * WIDTH + v * LANES);
    for (long k = 0; k < depth; k++, w += WIDTH) {
        PREFETCH(w);
#ifdef DOT_PAIRS
        I column[VECTORS];
        for (int v = 0; v < VECTORS; v++)
            column[v] = LOAD_PAIRS(w + v * LANES);
        for (int r = 0; r < rows; r++) {
            I each = SPREAD_PAIR(x[r * stride + k]);
            for (int v = 0; v < VECTORS; v++)
                acc[r][v] = DOT_PAIRS(acc[r][v], each, column[v]);
        }
#else
        V even[VECTORS], odd[VECTORS];
        for (int v = 0; v < VECTORS; v++) {
            I column = LOAD_PAIRS(w + v * LANES);
            even[v] = EVEN(column), odd[v] = ODD(column);
        }
        for (int r = 0; r < rows; r++) {
            I each = SPREAD_PAIR(x[r * stride + k]);
            for (int v = 0; v < VECTORS; v++)
                acc[r][v] = MULTIPLY_ADD(ODD(each), odd[v], MULTIPLY_ADD(EVEN(each), even[v], acc[r][v]));
        }
#endif
    }
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < VECTORS; v++)
            STORE(sums + r * WIDTH + v * LANES, acc[r][v]);
}

/* Up to TILE_ROWS rows of x [rows, stride], of 4 bytes each number or pair. */
TARGET static void NAME(tile)(long kind, const char *x, long stride, const char *w, long depth, float *sums, int rows)
{
#define CASE(n) case n: \
        if (kind == FLOATS) NAME(floats)((const float *)x, stride, w, depth, sums, n, FLOATS); \
        else if (kind == BYTES) NAME(floats)((const float *)x, stride, w, depth, sums, n, BYTES); \
        else NAME(pairs)((const int *)x, stride, (const int *)w, depth, sums, n); \
        break;
    switch (rows) {
        CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6)
#if TILE_ROWS > 6
        CASE(7) CASE(8) CASE(9) CASE(10) CASE(11) CASE(12)
#endif
    }
#undef CASE
}

/* The features block*WIDTH .. of all rows. A chunk of the weights stays in the first cache for all of them. */
TARGET static void NAME(block)(const struct product *p, const char *x, long rows, char *y, long block)
{
    float sums[MOST_ROWS * WIDTH];
    long groups = (rows + TILE_ROWS - 1) / TILE_ROWS, each = (rows + groups - 1) / groups;
    long chunk = groups == 1 ? p->depth : CHUNK;
    long line = WIDTH * (p->kind == BYTES ? 1 : 4);
    const char *w = (const char *)p->weights + block * p->depth * line;
    for (long i = 0; i < rows * WIDTH; i++)
        sums[i] = 0.0f;
    for (long k = 0; k < p->depth; k += chunk) {
        long depth = p->depth - k < chunk ? p->depth - k : chunk;
        for (long row = 0; row < rows; row += each)
            NAME(tile)(p->kind, x + (row * p->depth + k) * 4, p->depth, w + k * line, depth, sums + row * WIDTH,
                       (int)(rows - row < each ? rows - row : each));
    }
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
