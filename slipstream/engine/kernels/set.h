/* What is compiled once for each instruction set. Included by kernels.c, which defines for each
 *
 *   NAME(x)  a name of the set's own        TARGET  the attribute that lets the compiler use the set
 *   V, I     a vector of LANES floats, and one of as many 32-bit integers
 *   AHEAD    bytes, and the operations in capitals below. */

#define WIDTH (LANES * VECTORS)
#define ALWAYS static inline __attribute__((always_inline))

/* A case of a switch for each number of rows that a tile may have. */
#if TILE_ROWS > 6
#define EACH_COUNT(CASE) \
    CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6) CASE(7) CASE(8) CASE(9) CASE(10) CASE(11) CASE(12)
#else
#define EACH_COUNT(CASE) CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6)
#endif

#include "tile.h"
#include "attention.h"

#undef WIDTH
#undef AHEAD
#undef LEAST_WIDENED
#undef ALWAYS
#undef SIDE
#undef UNROLLED
#undef FORGET_LOADS
#undef EACH_COUNT
#undef NAME
#undef TARGET
#undef V
#undef I
#undef LANES
#undef VECTORS
#undef TILE_ROWS
#undef GROUP_ROWS
#undef GROUP_SIDE
#undef LOAD
#undef STORE
#undef SPREAD
#undef MULTIPLY_ADD
#undef LARGER
#undef LOAD_BYTES
#undef LOAD_PAIRS
#undef LOAD_HALVES
#undef SPREAD_PAIR
#undef EVEN
#undef ODD
#undef ODD_UNMASKED
#undef DOT_PAIRS
#undef PAIR_UP
