/* bf16 weights in 12 bits, bit for bit: memory delivers weights more slowly than few rows can be multiplied with them.
 *
 * Of 16 bits of a trained weight eight are its exponent, and some 2,000 weights have at most 16 different ones. A group has
 * a table of those; a weight is its sign and fraction, a byte, and the number of its exponent, half a byte. A group with
 * more exponents stays as it is, elsewhere, and its head says where.
 *
 * A line is what all features of a block take of one step: LINE bf16 numbers. Two lines lie together: the bytes of either,
 * then a byte for two numbers of exponents, the first line's in its lower half. Bytes are in the order in which the
 * processor puts halves of vectors side by side: number 8 * lane + j of half a line is byte 16 * lane + 8 * half + j. */

#define LINE 64
#define GROUP_LINES 32
#define TWO_LINES (3 * LINE)

struct group_head {
    unsigned char high[16], low[16]; /* of each exponent its seven higher bits, and its lowest as bit 7 */
    const unsigned short *raw;       /* the group's lines as they were; or null */
    char unused[24];
};
#define GROUP_BYTES (sizeof(struct group_head) + GROUP_LINES / 2 * TWO_LINES)

/* Bytes of a block of so many lines. */
static long squeezed_bytes(long lines)
{
    return (lines + GROUP_LINES - 1) / GROUP_LINES * sizeof(struct group_head) + (lines + 1) / 2 * TWO_LINES;
}

#ifdef WIDE_VECTORS /* tests on CPUs without the instructions */
static int place_in_line(int number)
{
    return number % (LINE / 2) / 8 * 16 + number / (LINE / 2) * 8 + number % 8;
}

static void squeeze_line(const unsigned short *line, const unsigned char *exponents, int known, unsigned char *rest,
                         unsigned char *numbers, int shift)
{
    for (int i = 0; i < LINE; i++) {
        int at = place_in_line(i), number = 0;
        while (number < known - 1 && exponents[number] != (line[i] >> 7 & 0xff))
            number++;
        rest[at] = (unsigned char)((line[i] >> 8 & 0x80) | (line[i] & 0x7f));
        numbers[at] |= (unsigned char)(number << shift);
    }
}
#else
__attribute__((target("avx512f,avx512bw"))) static void squeeze_line(const unsigned short *line,
                                                                     const unsigned char *exponents, int known,
                                                                     unsigned char *rest, unsigned char *numbers, int shift)
{
    const __m512i first = _mm512_loadu_si512(line), second = _mm512_loadu_si512(line + LINE / 2);
    const __m512i byte = _mm512_set1_epi16(0xff), sign = _mm512_set1_epi8((char)0x80);
    __m512i lower = _mm512_packus_epi16(_mm512_and_si512(first, byte), _mm512_and_si512(second, byte));
    __m512i upper = _mm512_packus_epi16(_mm512_srli_epi16(first, 8), _mm512_srli_epi16(second, 8));
    __m512i exponent = _mm512_packus_epi16(_mm512_and_si512(_mm512_srli_epi16(first, 7), byte),
                                           _mm512_and_si512(_mm512_srli_epi16(second, 7), byte));
    __m512i number = _mm512_setzero_si512();
    for (int i = 1; i < known; i++)
        number = _mm512_mask_mov_epi8(number, _mm512_cmpeq_epi8_mask(exponent, _mm512_set1_epi8((char)exponents[i])),
                                      _mm512_set1_epi8((char)i));
    _mm512_storeu_si512(rest, _mm512_ternarylogic_epi32(upper, lower, sign, 0xe4)); /* the sign of one, the rest of the other */
    _mm512_storeu_si512(numbers, _mm512_or_si512(_mm512_loadu_si512(numbers), _mm512_slli_epi16(number, (unsigned)shift)));
}
#endif

/* Whether 16 exponents are enough; then the group is written. */
static int squeeze_group(const unsigned short *lines, long count, char *to)
{
    struct group_head head = {0};
    unsigned char exponents[16], known[256] = {0};
    int found = 0;
    for (long i = 0; i < count * LINE; i++) {
        int exponent = lines[i] >> 7 & 0xff;
        if (known[exponent])
            continue;
        if (found == 16)
            return 0;
        known[exponent] = 1;
        head.high[found] = (unsigned char)(exponent >> 1);
        head.low[found] = (unsigned char)(exponent << 7);
        exponents[found++] = (unsigned char)exponent;
    }
    memcpy(to, &head, sizeof head);
    to += sizeof head;
    memset(to, 0, (count + 1) / 2 * TWO_LINES);
    for (long line = 0; line < count; line++) {
        unsigned char *two = (unsigned char *)to + line / 2 * TWO_LINES;
        squeeze_line(lines + line * LINE, exponents, found, two + line % 2 * LINE, two + 2 * LINE, (int)(line % 2 * 4));
    }
    return 1;
}

/* Writes blocks [blocks, lines, LINE] to `to` [blocks, squeezed_bytes(lines)], and groups with too many exponents to `raw`
 * [most, GROUP_LINES, LINE]. Returns how many there are; above `most` it gives up. */
long slipstream_squeeze(const unsigned short *weights, long blocks, long lines, char *to, unsigned short *raw, long most)
{
    long found = 0;
    for (long block = 0; block < blocks; block++, to += squeezed_bytes(lines))
        for (long line = 0; line < lines; line += GROUP_LINES) {
            long count = lines - line < GROUP_LINES ? lines - line : GROUP_LINES;
            const unsigned short *group = weights + (block * lines + line) * LINE;
            char *at = to + line / GROUP_LINES * GROUP_BYTES;
            if (squeeze_group(group, count, at))
                continue;
            if (found++ == most)
                return found;
            struct group_head head = {.raw = raw};
            memcpy(at, &head, sizeof head);
            memcpy(raw, group, count * LINE * 2);
            raw += GROUP_LINES * LINE;
        }
    return found;
}

long slipstream_squeezed_bytes(long lines)
{
    return squeezed_bytes(lines);
}

#ifdef WIDE_VECTORS /* tests on CPUs without the instructions */
/* Writes the first `count` lines of a group. */
static void unsqueeze_group(const struct group_head *head, const char *from, long count, unsigned short *to)
{
    for (long line = 0; line < count; line++, to += LINE) {
        const unsigned char *two = (const unsigned char *)from + line / 2 * TWO_LINES;
        for (int i = 0; i < LINE; i++) {
            int at = place_in_line(i), exponent = two[2 * LINE + at] >> line % 2 * 4 & 15, rest = two[line % 2 * LINE + at];
            to[i] = (unsigned short)(((rest & 0x80) | head->high[exponent]) << 8 | (rest & 0x7f) | head->low[exponent]);
        }
    }
}
#else
#define IN_REGISTERS __attribute__((target("avx512f,avx512bw"), always_inline)) static inline

/* Half of a group's table, in each lane. */
IN_REGISTERS __m512i spread(const unsigned char *half)
{
    return _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i *)half));
}

/* The numbers of a line, in two halves. `which`: the lower half of each byte is the number of an exponent. */
IN_REGISTERS void unsqueeze_line(const char *line, __m512i which, __m512i high, __m512i low, __m512i *to)
{
    const __m512i sign = _mm512_set1_epi8((char)0x80), number = _mm512_and_si512(which, _mm512_set1_epi8(15));
    __m512i rest = _mm512_loadu_si512(line);
    __m512i upper = _mm512_ternarylogic_epi32(rest, sign, _mm512_shuffle_epi8(high, number), 0xea);
    __m512i lower = _mm512_ternarylogic_epi32(rest, sign, _mm512_shuffle_epi8(low, number), 0xba);
    to[0] = _mm512_unpacklo_epi8(lower, upper), to[1] = _mm512_unpackhi_epi8(lower, upper);
}

/* Writes an even number of lines. */
__attribute__((target("avx512f,avx512bw"))) static void unsqueeze_group(const struct group_head *head, const char *from,
                                                                          long count, unsigned short *to)
{
    const __m512i high = spread(head->high), low = spread(head->low);
    for (long line = 0; line < count; line += 2, from += TWO_LINES, to += 2 * LINE) {
        __m512i numbers = _mm512_loadu_si512(from + 2 * LINE), halves[4];
        unsqueeze_line(from, numbers, high, low, halves);
        unsqueeze_line(from + LINE, _mm512_srli_epi16(numbers, 4), high, low, halves + 2);
        for (int half = 0; half < 4; half++)
            _mm512_storeu_si512(to + half * LINE / 2, halves[half]);
    }
}
#endif

/* Lines `first` .. first + count - 1 of a block; `first` is a group's. `to` has room for another line. */
static void unsqueeze(const char *block, long first, long count, unsigned short *to)
{
    const char *from = block + first / GROUP_LINES * GROUP_BYTES;
    for (long line = 0; line < count; line += GROUP_LINES, from += GROUP_BYTES, to += GROUP_LINES * LINE) {
        long some = count - line < GROUP_LINES ? count - line : GROUP_LINES;
        const struct group_head *head = (const struct group_head *)from;
        if (head->raw)
            memcpy(to, head->raw, some * LINE * 2);
        else
            unsqueeze_group(head, from + sizeof *head, some, to);
    }
}
