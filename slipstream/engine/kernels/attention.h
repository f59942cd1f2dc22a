/* Attention of rows to paged keys and values, for one instruction set (set.h), in fp32; with instructions for pairs of
 * bf16, their products: exact ones of queries and keys, and of values with weights that are rounded to bf16, as the
 * library rounds them. Sums, scores and softmax are fp32 everywhere.
 *
 * A row's keys are added up in the order of their positions, BLOCK of them at a time: scores by products in which each
 * is one chain over the head's numbers, softmax with the running maximum of the blocks so far (Milakov and Gimelshein
 * 2018, arXiv 1805.02867), values as one chain of multiply-adds. So a row's bits are a function of its query and of the
 * keys and values on its path, wherever they lie and whatever else is in the pass. */

/* Eight numbers of a head. */
TARGET ALWAYS __m256 NAME(eight)(const char *from, const long kind, long at)
{
    if (kind == FLOATS)
        return _mm256_loadu_ps((const float *)from + at);
    __m128i halves = _mm_loadu_si128((const __m128i *)((const unsigned short *)from + at));
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(halves), 16));
}

/* Turns [8 keys, 8 floats or pairs] into [8, WIDTH]. */
TARGET ALWAYS void NAME(turn)(const char *const *from, long at, float *to)
{
    __m256 a[8], b[8];
    for (int i = 0; i < 8; i++)
        a[i] = _mm256_loadu_ps((const float *)from[i] + at);
    for (int i = 0; i < 8; i += 2) {
        b[i] = _mm256_unpacklo_ps(a[i], a[i + 1]);
        b[i + 1] = _mm256_unpackhi_ps(a[i], a[i + 1]);
    }
    for (int i = 0; i < 8; i += 4)
        for (int j = 0; j < 2; j++) {
            a[i + 2 * j] = _mm256_shuffle_ps(b[i + j], b[i + j + 2], 0x44);
            a[i + 2 * j + 1] = _mm256_shuffle_ps(b[i + j], b[i + j + 2], 0xee);
        }
    for (int i = 0; i < 4; i++) {
        _mm256_storeu_ps(to + i * WIDTH, _mm256_permute2f128_ps(a[i], a[i + 4], 0x20));
        _mm256_storeu_ps(to + (i + 4) * WIDTH, _mm256_permute2f128_ps(a[i], a[i + 4], 0x31));
    }
}

#ifdef DOT_PAIRS
typedef unsigned short NAME(number); /* of a query or a weight: bf16 */
#define PAIRED(first) ((first) & ~1L)
#else
typedef float NAME(number);
#define PAIRED(first) (first)
#endif

/* What a layer makes of `count` products of queries and keys: it scales them, where queries are as they were, and cuts
 * them softly, cap * tanh(score / cap) (Gemma 2). */
TARGET static void NAME(finish_scores)(const struct layer *a, float *scores, long count)
{
    const float cap = a->softcap;
#ifdef DOT_PAIRS
    for (long i = 0; i < count; i++)
        scores[i] *= a->scale;
#endif
    for (long i = 0; cap && i < count; i++) {
        float x = scores[i], e = exponential((x < 0 ? x : -x) * (2.0f / cap)), y = cap * ((1.0f - e) / (1.0f + e));
        scores[i] = x < 0 ? -y : y;
    }
}

/* Scores [keys / WIDTH, rows, WIDTH] of the queries [rows, dim] with `count` keys. */
TARGET static void NAME(score)(const char *const *keys, long kind, long dim, long count, const NAME(number) *queries,
                               long rows, float *scores, struct wanted *soon)
{
    float packed[MOST_DIM * WIDTH]; /* [floats or pairs of a key, WIDTH] */
    long depth = kind == FLOATS ? dim : dim / 2, stride = dim * sizeof(NAME(number)) / 4;
    struct steps s = {(const char *)packed, 0, depth, (const char *)packed, WIDTH * sizeof(float), 0};
    for (long j = 0; j < count; j += WIDTH, scores += rows * WIDTH) {
        const char *from[WIDTH];
        for (long i = 0; i < WIDTH; i++)
            from[i] = keys[j + i < count ? j + i : j];
        for (long i = 0; i < WIDTH; i += 8) {
            for (long d = 0; d < depth; d += 8)
                NAME(turn)(from + i, d, packed + d * WIDTH + i);
            ask(soon, 8);
        }
        memset(scores, 0, rows * WIDTH * sizeof(float));
        for (long row = 0; row < rows; row += TILE_ROWS)
            NAME(tile)(kind, &s, (const char *)(queries + row * dim), stride, scores + row * WIDTH,
                       (int)(rows - row < TILE_ROWS ? rows - row : TILE_ROWS), 1);
    }
}

#ifdef DOT_PAIRS
/* As add_values, 2 * WIDTH numbers of each value, for up to TILE_ROWS / 2 rows: registers hold their sums and the pairs. */
TARGET ALWAYS void NAME(add_few)(const char *const *values, long d, long count, const NAME(number) *weights, float *sums,
                                 const int rows, long sums_rows, struct wanted *soon)
{
    V acc[TILE_ROWS / 2][2][VECTORS];
    UNROLLED for (int r = 0; r < rows; r++)
        UNROLLED for (int half = 0; half < 2; half++)
            UNROLLED for (int v = 0; v < VECTORS; v++)
                acc[r][half][v] = LOAD(sums + (half * sums_rows + r) * WIDTH + v * LANES);
    for (long j = 0; j < count; j += 2) {
        const unsigned short *first = (const unsigned short *)values[j] + d;
        const unsigned short *second = j + 1 < count ? (const unsigned short *)values[j + 1] + d : first;
        I pairs[2][VECTORS];
        ask(soon, 2);
        UNROLLED for (int half = 0; half < 2; half++) {
            I a = LOAD_PAIRS(first + half * WIDTH), b = LOAD_PAIRS(second + half * WIDTH);
            UNROLLED for (int v = 0; v < VECTORS; v++)
                pairs[half][v] = PAIR_UP(a, b, v);
        }
        UNROLLED for (int r = 0; r < rows; r++) {
            int weight;
            memcpy(&weight, weights + r * BLOCK + j, sizeof weight);
            UNROLLED for (int half = 0; half < 2; half++)
                UNROLLED for (int v = 0; v < VECTORS; v++)
                    acc[r][half][v] = DOT_PAIRS(acc[r][half][v], SPREAD_PAIR(weight), pairs[half][v]);
        }
    }
    UNROLLED for (int r = 0; r < rows; r++)
        UNROLLED for (int half = 0; half < 2; half++)
            UNROLLED for (int v = 0; v < VECTORS; v++)
                STORE(sums + (half * sums_rows + r) * WIDTH + v * LANES, acc[r][half][v]);
}

/* Adds `count` values, in pairs from the first on, times the weights [rows, BLOCK] to the sums [dim / WIDTH, sums_rows,
 * WIDTH]. Weights are zeros from `count` on. */
TARGET static void NAME(add_values)(const char *const *values, long kind, long dim, long count,
                                    const NAME(number) *weights, float *sums, long rows, long sums_rows,
                                    struct wanted *soon)
{
    unsigned pairs[BLOCK / 2 * WIDTH]; /* [pairs of values, WIDTH] */
    struct steps s = {(const char *)pairs, 0, (count + 1) / 2, (const char *)pairs, WIDTH * sizeof(float), 0};
    long d = 0;
#define CASE(n) case n: \
        NAME(add_few)(values, d, count, weights + row * BLOCK, sums + row * WIDTH, n, sums_rows, soon); \
        break;
    long most = rows <= TILE_ROWS / 2 ? rows : (rows + 1) / 2;
    if (rows <= TILE_ROWS)
        for (; d + 2 * WIDTH <= dim; d += 2 * WIDTH, sums += 2 * sums_rows * WIDTH)
            for (long row = 0; row < rows; row += most)
                switch (rows - row < most ? rows - row : most) {
                    CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6)
                }
#undef CASE
    for (; d < dim; d += WIDTH, sums += sums_rows * WIDTH) {
        long width = dim - d < WIDTH ? LANES : WIDTH;
        for (long j = 0; j < count; j += 2) {
            const unsigned short *first = (const unsigned short *)values[j] + d;
            const unsigned short *second = j + 1 < count ? (const unsigned short *)values[j + 1] + d : first;
            unsigned *to = pairs + j / 2 * WIDTH;
            ask(soon, 1);
            for (long lane = 0; lane < width; lane += LANES)
                for (int i = 0; i < LANES; i++)
                    to[lane + i] = first[lane + i] | (unsigned)second[lane + i] << 16;
            if (width < WIDTH)
                memset(to + width, 0, (WIDTH - width) * sizeof *to);
        }
        for (long row = 0; row < rows; row += TILE_ROWS)
            NAME(tile)(kind, &s, (const char *)(weights + row * BLOCK), BLOCK / 2, sums + row * WIDTH,
                       (int)(rows - row < TILE_ROWS ? rows - row : TILE_ROWS), 1);
    }
}
#else
/* Adds values, LANES * vectors numbers of each, times the weights [rows, BLOCK] to the sums [rows, WIDTH]. */
TARGET ALWAYS void NAME(add_some)(const char *const *values, long at, const long kind, long count, const float *weights,
                                  float *sums, const int rows, const int vectors)
{
    V acc[TILE_ROWS][VECTORS];
    UNROLLED for (int r = 0; r < rows; r++)
        UNROLLED for (int v = 0; v < vectors; v++)
            acc[r][v] = LOAD(sums + r * WIDTH + v * LANES);
    for (long j = 0; j < count; j++) {
        V value[VECTORS];
        UNROLLED for (int v = 0; v < vectors; v++)
            value[v] = kind == FLOATS ? LOAD((const float *)values[j] + at + v * LANES)
                                      : LOAD_HALVES((const unsigned short *)values[j] + at + v * LANES);
        UNROLLED for (int r = 0; r < rows; r++) {
            V weight = SPREAD(weights[r * BLOCK + j]);
            UNROLLED for (int v = 0; v < vectors; v++)
                acc[r][v] = MULTIPLY_ADD(weight, value[v], acc[r][v]);
        }
    }
    UNROLLED for (int r = 0; r < rows; r++)
        UNROLLED for (int v = 0; v < vectors; v++)
            STORE(sums + r * WIDTH + v * LANES, acc[r][v]);
}

/* Up to TILE_ROWS rows. */
TARGET static void NAME(add_tile)(const char *const *values, long at, long kind, long count, const float *weights,
                                  float *sums, int rows, int vectors)
{
#define CASE(n) case n: \
        if (vectors < VECTORS) NAME(add_some)(values, at, kind, count, weights, sums, n, 1); \
        else if (kind == FLOATS) NAME(add_some)(values, at, FLOATS, count, weights, sums, n, VECTORS); \
        else NAME(add_some)(values, at, PAIRS, count, weights, sums, n, VECTORS); \
        break;
    switch (rows) {
        EACH_COUNT(CASE)
    }
#undef CASE
}

/* Adds `count` values times the weights [rows, BLOCK] to the sums [dim / WIDTH, sums_rows, WIDTH]. */
TARGET static void NAME(add_values)(const char *const *values, long kind, long dim, long count, const float *weights,
                                    float *sums, long rows, long sums_rows, struct wanted *soon)
{
    ask(soon, BLOCK);
    for (long d = 0; d < dim; d += WIDTH, sums += sums_rows * WIDTH)
        for (long row = 0; row < rows; row += TILE_ROWS)
            NAME(add_tile)(values, d, kind, count, weights + row * BLOCK, sums + row * WIDTH,
                           (int)(rows - row < TILE_ROWS ? rows - row : TILE_ROWS),
                           dim - d < WIDTH ? 1 : VECTORS);
}
#endif

/* Puts exp(x - most) into x [BLOCK] for begin .. end-1, zeros elsewhere, and adds them to the sums [SUMS] side by side. */
TARGET static void NAME(exponentials)(float *restrict x, long begin, long end, float most, float *restrict sums)
{
    long first = begin - begin % SUMS, j = first;
    memset(x, 0, first * sizeof *x);
    for (; j < end; j += SUMS) {
        int from = (int)(begin - j), to = (int)(end - j);
        for (int i = 0; i < SUMS; i++) {
            float z = exponential(x[j + i] - most);
            z = i >= from && i < to ? z : 0.0f;
            x[j + i] = z;
            sums[i] += z;
        }
    }
    memset(x + j, 0, (BLOCK - j) * sizeof *x);
}

/* The largest of `most` and x for begin .. end-1. Compilers take a maximum over an array number by number: groups of LANES
 * are written out. */
TARGET static float NAME(largest)(const float *x, long begin, long end, float most)
{
    float side[LANES];
    V mosts = SPREAD(most);
    long j = begin;
    for (; j < end && j % LANES; j++)
        most = x[j] > most ? x[j] : most;
    for (; j + LANES <= end; j += LANES)
        mosts = LARGER(LOAD(x + j), mosts);
    for (; j < end; j++)
        most = x[j] > most ? x[j] : most;
    STORE(side, mosts);
    for (int half = LANES / 2; half; half /= 2)
        for (int i = 0; i < half; i++)
            side[i] = side[i + half] > side[i] ? side[i + half] : side[i];
    return side[0] > most ? side[0] : most;
}

/* Takes the scores x [BLOCK] of a block's visible keys begin .. end-1; x becomes their weights. Returns the factor for
 * what was added up before. */
TARGET static float NAME(weigh)(struct softmax *row, float *x, long begin, long end)
{
    float most = NAME(largest)(x, begin, end, row->most), factor = 1.0f;
    if (most > row->most) {
        if (row->most > -INFINITY) {
            float before[BLOCK] = {row->most}, nothing[SUMS] = {0};
            NAME(exponentials)(before, 0, 1, most, nothing);
            factor = before[0];
            for (int i = 0; i < SUMS; i++)
                row->sums[i] *= factor;
        }
        row->most = most;
    }
    NAME(exponentials)(x, begin, end, most, row->sums);
    return factor;
}

/* A row's weights as values are multiplied with them. */
TARGET static void NAME(store_weights)(const float *x, NAME(number) *to)
{
#ifdef DOT_PAIRS
    for (long j = 0; j < BLOCK; j++)
        to[j] = to_bf16(x[j]);
#else
    memcpy(to, x, BLOCK * sizeof *to);
#endif
}

/* Multiplies a row of sums [tiles, rows, WIDTH]. */
TARGET static void NAME(shrink)(float *row, long tiles, long rows, float factor)
{
    if (factor != 1.0f)
        for (long t = 0; t < tiles; t++)
            for (long i = 0; i < WIDTH; i++)
                row[t * rows * WIDTH + i] *= factor;
}

/* Attention of the part's tokens for one KV head. Rows are its tokens' query heads, token by token. `next`: what the
 * thread attends to afterwards, or null. */
TARGET static void NAME(attend)(const struct layer *a, const struct call *c, const struct part *p, long head,
                                const struct part *next, long next_head)
{
    long size = item(a->kind), rows = p->count * a->group, tiles = (a->value_dim + WIDTH - 1) / WIDTH;
    const char *keys = a->keys + head * a->key_head, *values = a->values + head * a->value_head;
    NAME(number) queries[MOST_QUERIES * MOST_DIM], weights[MOST_QUERIES * BLOCK];
    float out[MOST_QUERIES * MOST_DIM], scores[MOST_QUERIES * MOST_TAIL], x[BLOCK];
    const char *key_at[MOST_TAIL], *value_at[MOST_TAIL], *next_at[BLOCK];
    struct softmax state[MOST_QUERIES];
    long begin[MOST_QUERIES], end[MOST_QUERIES]; /* positions that a row sees by whole blocks */
    long trunk = p->base + p->pending, least = trunk + p->count, most = 0;
    long first_node = p->first < p->pending ? p->pending - p->first : 0; /* the first token that is a node */
    if (first_node > p->count)
        first_node = p->count;

    memset(out, 0, rows * tiles * WIDTH * sizeof(float));
    for (long token = 0; token < p->count; token++) {
        long position = p->base + p->first + token, seen = position + 1;
        if (token >= first_node) {
            position = trunk;
            for (long node = p->parents[p->first + token - p->pending]; node >= 0; node = p->parents[node])
                position++;
            seen = trunk - trunk % BLOCK;
        }
        for (long r = token * a->group; r < (token + 1) * a->group; r++) {
            long query_head = head * a->group + r % a->group;
            const char *query = c->query + (p->row + token) * c->query_token + query_head * c->query_head;
#ifdef DOT_PAIRS
            memcpy(queries + r * a->key_dim, query, a->key_dim * size);
#else
            for (long d = 0; d < a->key_dim; d += 8)
                _mm256_storeu_ps(queries + r * a->key_dim + d,
                                 _mm256_mul_ps(NAME(eight)(query, a->kind, d), _mm256_set1_ps(a->scale)));
#endif
            begin[r] = a->window && position + 1 > a->window ? position + 1 - a->window : 0;
            end[r] = seen;
            least = begin[r] < least ? begin[r] : least;
            most = seen > most ? seen : most;
            state[r] = (struct softmax){.most = -INFINITY};
            if (a->sinks)
                state[r] = (struct softmax){.most = a->sinks[query_head], .sums = {1}};
        }
    }

    long start = least - least % BLOCK;
    struct wanted soon = {next_at, 0, a->key_dim * size};
    for (long at = start; at < most; at += BLOCK) {
        long count = most - at < BLOCK ? most - at : BLOCK, low = rows, high = 0;
        for (long r = 0; r < rows; r++)
            if (end[r] > at && begin[r] < at + count) {
                low = r < low ? r : low;
                high = r + 1;
            }
        if (low >= high)
            continue;
        long some = high - low, left = most - at - count;
        find_rows(p, keys, a->key_row, at, count, key_at);
        find_rows(p, values, a->value_row, at, count, value_at);
        soon = (struct wanted){value_at, count, a->value_dim * size};
        NAME(score)(key_at, a->kind, a->key_dim, count, queries + low * a->key_dim, some, scores, &soon);
        soon = (struct wanted){next_at, left < BLOCK ? left : BLOCK, a->key_dim * size};
        if (left)
            find_rows(p, keys, a->key_row, at + count, soon.count, next_at);
        else if (next)
            soon.count = find_first_keys(a, next, next_head, next_at);
        for (long r = low; r < high; r++) {
            NAME(number) *weight = weights + (r - low) * BLOCK;
            long from = begin[r] > at ? begin[r] - at : 0, to = end[r] < at + count ? end[r] - at : count;
            if (from >= to) {
                memset(weight, 0, BLOCK * sizeof *weight);
                continue;
            }
            for (long j = 0; j < count; j += WIDTH)
                memcpy(x + j, scores + (j * some + (r - low) * WIDTH), WIDTH * sizeof *x);
            NAME(finish_scores)(a, x + from, to - from);
            NAME(shrink)(out + r * WIDTH, tiles, rows, NAME(weigh)(&state[r], x, from, to));
            NAME(store_weights)(x, weight);
            ask(&soon, 16);
        }
        NAME(add_values)(value_at, a->kind, a->value_dim, count, weights, out + low * WIDTH, some, rows, &soon);
        ask(&soon, BLOCK);
    }

    if (first_node < p->count) { /* the trunk's last keys and the paths of nodes, token by token */
        long at = trunk - trunk % BLOCK, shared = trunk - at, nodes = p->first + p->count - p->pending;
        long count = shared + nodes, first = first_node * a->group, some = rows - first;
        find_rows(p, keys, a->key_row, at, count, key_at);
        find_rows(p, values, a->value_row, at, count, value_at);
        soon = (struct wanted){value_at, count, a->value_dim * size};
        NAME(score)(key_at, a->kind, a->key_dim, count, queries + first * a->key_dim, some, scores, &soon);
        for (long token = first_node; token < p->count; token++) {
            long path[MOST_TAIL], length = shared, place = MOST_TAIL, row = token * a->group;
            for (long j = 0; j < shared; j++)
                path[j] = j;
            for (long node = p->first + token - p->pending; node >= 0; node = p->parents[node])
                path[--place] = shared + node;
            memmove(path + length, path + place, (MOST_TAIL - place) * sizeof(long));
            length += MOST_TAIL - place;
            for (long block = 0; block < length; block += BLOCK) {
                const char *on_path[BLOCK];
                long to = length - block < BLOCK ? length - block : BLOCK;
                long from = begin[row] > at + block ? begin[row] - at - block : 0;
                if (from >= to)
                    continue;
                long start = PAIRED(from); /* a key before the window has no weight */
                for (long j = start; j < to; j++)
                    on_path[j] = value_at[path[block + j]];
                for (long r = row; r < row + a->group; r++) {
                    for (long j = from; j < to; j++) {
                        long key = path[block + j];
                        x[j] = scores[(key / WIDTH * some + r - first) * WIDTH + key % WIDTH];
                    }
                    NAME(finish_scores)(a, x + from, to - from);
                    NAME(shrink)(out + r * WIDTH, tiles, rows, NAME(weigh)(&state[r], x, from, to));
                    NAME(store_weights)(x, weights + (r - row) * BLOCK);
                }
                NAME(add_values)(on_path + start, a->kind, a->value_dim, to - start, weights + start,
                                 out + row * WIDTH, a->group, rows, &soon);
            }
        }
    }

    for (long r = 0; r < rows; r++) {
        float sum = 0;
        for (int i = 0; i < SUMS; i++)
            sum += state[r].sums[i];
        long query = (p->row + r / a->group) * a->heads * a->group + head * a->group + r % a->group;
        char *to = c->out + query * a->value_dim * size;
        float found[MOST_DIM];
        for (long t = 0; t < tiles; t++)
            for (long i = 0; i < WIDTH; i++)
                found[t * WIDTH + i] = out[(t * rows + r) * WIDTH + i] / sum;
        if (a->kind == FLOATS)
            memcpy(to, found, a->value_dim * sizeof *found);
        else
            for (long d = 0; d < a->value_dim; d++)
                ((unsigned short *)to)[d] = to_bf16(found[d]);
    }
}

#undef PAIRED
