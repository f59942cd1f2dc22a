/* The layers of a Llama-like decoder in one call: RMSNorm, rotary embeddings, grouped-query attention with optional
 * norms of queries and keys, SwiGLU. What lies between the products is computed in fp32 and rounded once for each step. */

/* A layer. Norms' weights are fp32. */
struct block {
    const float *attention_norm, *feed_norm;
    const float *query_norm, *key_norm; /* [key_dim] or null */
    const struct product *qkv;          /* [heads * (group + 2) * dim, hidden] */
    const struct product *out, *gate_up, *down;
    const struct layer *attention;
    char *kept; /* [tokens, hidden]: the hidden states that enter the layer are copied there; or null */
    float attention_epsilon, feed_epsilon, query_epsilon, key_epsilon;
};

#define STAGES 16 /* of a layer, at most */

/* A pass over `tokens` tokens. All arrays but `written` and `wide` are of one kind. */
struct pass {
    const struct block *blocks;
    const struct part *parts;
    const long *written;
    const char *cosine, *sine; /* [tokens, dim] */
    char *x;                   /* [tokens, hidden]: embeddings, then what the last layer adds up to */
    char *normed;              /* [tokens, hidden] */
    char *states;              /* [tokens, heads * (group + 2) * dim] */
    char *found;               /* [tokens, heads * group * dim] */
    char *gates;               /* [tokens, 2 * feed] */
    char *fed;                 /* [tokens, feed] */
    float *wide;               /* [tokens, the most input features]: bf16 as floats, for products that take floats */
    struct stage *stages;      /* [layers, STAGES], zeros */
    long layers, part_count, tokens, hidden, feed, kind;
    long few; /* multiplications that one thread has done before others have woken up */
    long threads;
    parallel *run;
};

#define WIDE __attribute__((target("avx2,fma")))
#ifdef WIDE_VECTORS
#define WIDER WIDE
#else
#define WIDER __attribute__((target("avx512f,avx512bw,avx512bf16,fma")))
#endif

#define ROTATE(name, T, READ, WRITE)                                                          \
    WIDE static void name(T *x, const T *cosine, const T *sine, long half)                    \
    {                                                                                         \
        for (long i = 0; i < half; i++) {                                                     \
            float a = READ(x[i]), b = READ(x[i + half]);                                      \
            x[i] = WRITE(a * READ(cosine[i]) + b * READ(sine[i]));                            \
            x[i + half] = WRITE(b * READ(cosine[i + half]) + a * READ(sine[i + half]));       \
        }                                                                                     \
    }
ROTATE(rotate_floats, float, , )
ROTATE(rotate_bf16, unsigned short, from_bf16, to_bf16)

/* silu(gate) * up */
#define GATE(name, WIDE, T, READ, WRITE)                                                      \
    WIDE static void name(const T *gate, const T *up, T *y, long width)                       \
    {                                                                                         \
        for (long i = 0; i < width; i++)                                                      \
            y[i] = WRITE(READ(gate[i]) / (1.0f + exponential(-READ(gate[i]))) * READ(up[i])); \
    }
GATE(gate_floats, WIDE, float, , )
GATE(gate_bf16, WIDE, unsigned short, from_bf16, to_bf16)
GATE(gate_bf16_wider, WIDER, unsigned short, from_bf16, to_bf16)

#define ADD(name, T, READ, WRITE)                                                             \
    WIDE static void name(T *x, const T *y, long width)                                       \
    {                                                                                         \
        for (long i = 0; i < width; i++)                                                      \
            x[i] = WRITE(READ(x[i]) + READ(y[i]));                                            \
    }
ADD(add_floats, float, , )
ADD(add_bf16, unsigned short, from_bf16, to_bf16)

/* What is done row by row between the products of a layer. */
typedef void rowwise(const struct pass *, const struct block *, long row);

static void enter(const struct pass *p, const struct block *b, long row)
{
    long size = p->hidden * item(p->kind), at = row * size;
    if (b->kept)
        memcpy(b->kept + at, p->x + at, size);
    norm(p->kind, b->attention_norm, b->attention_epsilon, p->x + at, p->normed + at, p->hidden);
}

/* Rotates a token's queries and keys, and writes its keys and values to the pools. */
static void turn_heads(const struct pass *p, const struct block *b, long row)
{
    const struct layer *a = b->attention;
    long dim = a->key_dim, queries = a->heads * a->group, size = dim * item(p->kind);
    char *first = p->states + row * (queries + 2 * a->heads) * size, *head = first;
    const char *cosine = p->cosine + row * size, *sine = p->sine + row * size;
    for (long h = 0; h < queries + a->heads; h++, head += size) {
        if (b->query_norm)
            norm(p->kind, h < queries ? b->query_norm : b->key_norm, h < queries ? b->query_epsilon : b->key_epsilon,
                 head, head, dim);
        if (p->kind == FLOATS)
            rotate_floats((float *)head, (const float *)cosine, (const float *)sine, dim / 2);
        else
            rotate_bf16((unsigned short *)head, (const unsigned short *)cosine, (const unsigned short *)sine, dim / 2);
    }
    write_row(a->keys + p->written[row] * a->key_row, a->key_head, first + queries * size, size, a->heads, size);
    write_row(a->values + p->written[row] * a->value_row, a->value_head, head, size, a->heads, size);
}

static void add(const struct pass *p, const struct block *b, long row)
{
    long at = row * p->hidden * item(p->kind);
    (void)b;
    if (p->kind == FLOATS)
        add_floats((float *)(p->x + at), (const float *)(p->normed + at), p->hidden);
    else
        add_bf16((unsigned short *)(p->x + at), (const unsigned short *)(p->normed + at), p->hidden);
}

static void add_attention(const struct pass *p, const struct block *b, long row)
{
    long at = row * p->hidden * item(p->kind);
    add(p, b, row);
    norm(p->kind, b->feed_norm, b->feed_epsilon, p->x + at, p->normed + at, p->hidden);
}

static void gate(const struct pass *p, const struct block *b, long row)
{
    long size = p->feed * item(p->kind);
    const char *both = p->gates + row * 2 * size;
    char *y = p->fed + row * size;
    if (p->kind == FLOATS)
        gate_floats((const float *)both, (const float *)(both + size), (float *)y, p->feed);
    else if (b->attention->level == AVX512_BF16)
        gate_bf16_wider((const unsigned short *)both, (const unsigned short *)(both + size), (unsigned short *)y, p->feed);
    else
        gate_bf16((const unsigned short *)both, (const unsigned short *)(both + size), (unsigned short *)y, p->feed);
}

struct rows {
    rowwise *each;
    const struct pass *pass;
    const struct block *block;
};

static void do_rows(const void *what, long first, long end)
{
    const struct rows *job = what;
    for (long row = first; row < end; row++)
        job->each(job->pass, job->block, row);
}

static void for_rows(struct stage *s, rowwise *each, const struct pass *p, const struct block *b)
{
    struct rows job = {each, p, b};
    take_part(s, do_rows, &job, p->tokens, 1, p->threads);
}

struct numbers {
    const unsigned short *from;
    float *to;
    long width;
};

static void widen_rows(const void *what, long first, long end)
{
    const struct numbers *n = what;
    for (long i = first * n->width; i < end * n->width; i++)
        n->to[i] = from_bf16(n->from[i]);
}

/* Two stages. */
static void multiply(struct stage *s, const struct pass *p, const struct product *product, const char *x, char *y)
{
    if (product->floats && p->kind == PAIRS) {
        struct numbers all = {(const unsigned short *)x, p->wide, inputs(product)};
        take_part(s, widen_rows, &all, p->tokens, 1, p->threads);
        x = (const char *)p->wide;
    }
    struct rows_of_product job = {product, x, y, p->tokens};
    take_part(s + 1, multiply_blocks, &job, blocks_of(product), least_blocks(p->tokens), p->threads);
}

/* What each of the threads of a pass does. */
static void decode(void *argument)
{
    const struct pass *p = argument;
    for (long layer = 0; layer < p->layers; layer++) {
        const struct block *b = p->blocks + layer;
        const struct layer *a = b->attention;
        struct stage *s = p->stages + layer * STAGES;
        long size = a->key_dim * item(p->kind), queries = a->heads * a->group * size, keys = a->heads * size;
        long token = queries + 2 * keys;
        struct call call = {p->states, p->states + queries, p->states + queries + keys, p->found,
                            token, size, token, size, token, size};
        struct parts_of_step parts = {a, &call, p->parts, p->part_count, s + 4};
        for_rows(s, enter, p, b);
        multiply(s + 1, p, b->qkv, p->normed, p->states);
        for_rows(s + 3, turn_heads, p, b);
        attend_parts(&parts);
        multiply(s + 5, p, b->out, p->found, p->normed);
        for_rows(s + 7, add_attention, p, b);
        multiply(s + 8, p, b->gate_up, p->normed, p->gates);
        for_rows(s + 10, gate, p, b);
        multiply(s + 11, p, b->down, p->fed, p->normed);
        for_rows(s + 13, add, p, b);
    }
}

/* Threads are woken up once. */
void slipstream_decode(struct pass *p)
{
    long each = 0; /* multiplications of a token in a layer */
    const struct product *products[] = {p->blocks->qkv, p->blocks->out, p->blocks->gate_up, p->blocks->down};
    for (int i = 0; i < 4; i++)
        each += products[i]->features * inputs(products[i]);
    if (p->threads > 1 && p->tokens * p->layers * each > p->few) {
        p->run(decode, p, (unsigned)p->threads, 0);
    } else {
        p->threads = 1;
        decode(p);
    }
}
