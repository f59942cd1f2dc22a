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
    long layers, part_count, tokens, hidden, feed, kind;
    long few; /* multiplications that one thread has done before others have woken up */
    long threads;
    parallel *run;
};

#define WIDE __attribute__((target("avx2,fma")))

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
#define GATE(name, T, READ, WRITE)                                                            \
    WIDE static void name(const T *gate, const T *up, T *y, long width)                       \
    {                                                                                         \
        for (long i = 0; i < width; i++)                                                      \
            y[i] = WRITE(READ(gate[i]) / (1.0f + exponential(-READ(gate[i]))) * READ(up[i])); \
    }
GATE(gate_floats, float, , )
GATE(gate_bf16, unsigned short, from_bf16, to_bf16)

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
    long at = row * p->hidden * item(p->kind);
    norm(p->kind, b->attention_norm, b->attention_epsilon, p->x + at, p->normed + at, p->hidden);
}

static void turn_heads(const struct pass *p, const struct block *b, long row)
{
    const struct layer *a = b->attention;
    long dim = a->key_dim, queries = a->heads * a->group, size = dim * item(p->kind);
    char *head = p->states + row * (queries + 2 * a->heads) * size;
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
}

static void add(const struct pass *p, long row)
{
    long at = row * p->hidden * item(p->kind);
    if (p->kind == FLOATS)
        add_floats((float *)(p->x + at), (const float *)(p->normed + at), p->hidden);
    else
        add_bf16((unsigned short *)(p->x + at), (const unsigned short *)(p->normed + at), p->hidden);
}

static void add_attention(const struct pass *p, const struct block *b, long row)
{
    long at = row * p->hidden * item(p->kind);
    add(p, row);
    norm(p->kind, b->feed_norm, b->feed_epsilon, p->x + at, p->normed + at, p->hidden);
}

static void gate(const struct pass *p, const struct block *b, long row)
{
    long size = p->feed * item(p->kind);
    const char *both = p->gates + row * 2 * size;
    char *y = p->fed + row * size;
    (void)b;
    if (p->kind == FLOATS)
        gate_floats((const float *)both, (const float *)(both + size), (float *)y, p->feed);
    else
        gate_bf16((const unsigned short *)both, (const unsigned short *)(both + size), (unsigned short *)y, p->feed);
}

static void add_feed(const struct pass *p, const struct block *b, long row)
{
    (void)b;
    add(p, row);
}

struct rows {
    rowwise *each;
    const struct pass *pass;
    const struct block *block;
    long next;
};

#define STEP 16 /* rows that a thread takes at a time */

static void work_on_rows(void *argument)
{
    struct rows *job = argument;
    for (;;) {
        long first = __atomic_fetch_add(&job->next, STEP, __ATOMIC_RELAXED);
        if (first >= job->pass->tokens)
            return;
        for (long row = first; row < first + STEP && row < job->pass->tokens; row++)
            job->each(job->pass, job->block, row);
    }
}

static void for_rows(rowwise *each, const struct pass *p, const struct block *b)
{
    struct rows job = {each, p, b, 0};
    if (p->threads > 1 && p->tokens > STEP)
        p->run(work_on_rows, &job, p->threads, 0);
    else
        work_on_rows(&job);
}

static void multiply(const struct pass *p, const struct product *product, const char *x, char *y)
{
    if (product->floats && p->kind == PAIRS) {
        for (long i = 0; i < p->tokens * product->depth * (product->kind == PAIRS ? 2 : 1); i++)
            p->wide[i] = from_bf16(((const unsigned short *)x)[i]);
        x = (const char *)p->wide;
    }
    slipstream_multiply(product, x, y, p->tokens, p->few, p->threads, p->run);
}

void slipstream_decode(const struct pass *p)
{
    for (long layer = 0; layer < p->layers; layer++) {
        const struct block *b = p->blocks + layer;
        const struct layer *a = b->attention;
        long size = a->key_dim * item(p->kind), queries = a->heads * a->group * size, keys = a->heads * size;
        long token = queries + 2 * keys;
        struct call call = {p->states, p->states + queries, p->states + queries + keys, p->found,
                            token, size, token, size, token, size};
        if (b->kept)
            memcpy(b->kept, p->x, p->tokens * p->hidden * item(p->kind));
        for_rows(enter, p, b);
        multiply(p, b->qkv, p->normed, p->states);
        for_rows(turn_heads, p, b);
        slipstream_attend(a, &call, p->parts, p->part_count, p->written, p->tokens, p->few, p->threads,
                          p->run);
        multiply(p, b->out, p->found, p->normed);
        for_rows(add_attention, p, b);
        multiply(p, b->gate_up, p->normed, p->gates);
        for_rows(gate, p, b);
        multiply(p, b->down, p->fed, p->normed);
        for_rows(add_feed, p, b);
    }
}
