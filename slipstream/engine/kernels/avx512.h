/* What set.h takes on CPUs with AVX-512. Tests bring operations of their own for other CPUs. */

#define LANES 16
#define VECTORS 2
#define TILE_ROWS 12
#define GROUP_ROWS 12
#define GROUP_SIDE 1
#define AHEAD 16384
#define LEAST_WIDENED PAIRS
#ifdef WIDE_VECTORS
#include WIDE_VECTORS
#else
#define V __m512
#define I __m512i
#define LOAD _mm512_loadu_ps
#define STORE _mm512_storeu_ps
#define SPREAD _mm512_set1_ps
#define MULTIPLY_ADD _mm512_fmadd_ps
#define LARGER _mm512_max_ps /* the second number where one is none */
#define LOAD_PAIRS(p) _mm512_loadu_si512((const void *)(p))
#define LOAD_HALVES(p) _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)(p))), 16))
#define SPREAD_PAIR _mm512_set1_epi32
#define PAIR_UP(a, b, half) _mm512_permutex2var_epi16(a, _mm512_loadu_si512(PAIRED_UP[half]), b)
#define LOAD_BYTES(p) _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)(p))))
#define EVEN(p) _mm512_castsi512_ps(_mm512_slli_epi32(p, 16))
#define ODD(p) _mm512_castsi512_ps(_mm512_and_si512(p, _mm512_set1_epi32((int)0xffff0000)))
#endif
#define ODD_UNMASKED ODD
#include "set.h"
