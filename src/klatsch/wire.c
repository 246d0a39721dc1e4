/* int8 with a scale per block of 256 numbers; the functions of channels/wire.py say the same in torch.
 *
 * The file includes itself, once for float and once for double. */
#ifndef T
#include <math.h>
#include <stdint.h>
#include <string.h>

enum { BLOCK = 256, LARGEST = 127 };

/* A float as bfloat16, rounded to nearest, ties to even; what is not a number stays so. */
static inline uint16_t rounded(float f) {
    uint32_t bits;
    memcpy(&bits, &f, sizeof bits);
    if (f != f) return 0x7fc0;
    return (uint16_t)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

static inline float widened(uint16_t half) {
    uint32_t bits = (uint32_t)half << 16;
    float f;
    memcpy(&f, &bits, sizeof f);
    return f;
}

#define T float
#define BITS uint32_t
#define RINT rintf
#define NAME(x) x##_f32
#include __FILE__
#undef T
#undef BITS
#undef RINT
#undef NAME
#define T double
#define BITS uint64_t
#define RINT rint
#define NAME(x) x##_f64
#include __FILE__
#else

/* n numbers to codes and scales. */
static void NAME(quantize)(const T *v, int64_t n, int8_t *codes, uint16_t *scales) {
    for (int64_t b = 0; b < n; b += BLOCK) {
        const int64_t size = n - b < BLOCK ? n - b : BLOCK;
        BITS top = 0; /* without its sign a number compares as its bits do; what is not a number is the largest */
        for (int64_t i = 0; i < size; i++) {
            BITS a;
            memcpy(&a, v + b + i, sizeof a);
            a &= (BITS)-1 >> 1;
            top = a > top ? a : top;
        }
        T most;
        memcpy(&most, &top, sizeof most);
        scales[b / BLOCK] = rounded((float)(most / LARGEST));
        const T step = widened(scales[b / BLOCK]);
        if (!(step < INFINITY)) { /* neighbours refuse it by its scale */
            memset(codes + b, 0, (size_t)size);
            continue;
        }
        const T unit = step > 0 ? step : 1;
        for (int64_t i = 0; i < size; i++) {
            T q = RINT(v[b + i] / unit);
            q = q < LARGEST ? q : LARGEST;
            q = q > -LARGEST ? q : -LARGEST;
            codes[b + i] = (int8_t)(int32_t)q;
        }
    }
}

/* Back again. */
static void NAME(restore)(const int8_t *codes, const uint16_t *scales, int64_t n, T *v) {
    for (int64_t b = 0; b < n; b += BLOCK) {
        const int64_t size = n - b < BLOCK ? n - b : BLOCK;
        const T scale = widened(scales[b / BLOCK]);
        for (int64_t i = 0; i < size; i++) v[b + i] = (T)codes[b + i] * scale;
    }
}

/* The same for rows of n numbers, each with blocks of its own: a simulation has many short ones. */
void NAME(klatsch_quantize)(const T *v, int64_t rows, int64_t n, int8_t *codes, uint16_t *scales) {
    const int64_t blocks = (n + BLOCK - 1) / BLOCK;
    for (int64_t r = 0; r < rows; r++) NAME(quantize)(v + r * n, n, codes + r * n, scales + r * blocks);
}

void NAME(klatsch_restore)(const int8_t *codes, const uint16_t *scales, int64_t rows, int64_t n, T *v) {
    const int64_t blocks = (n + BLOCK - 1) / BLOCK;
    for (int64_t r = 0; r < rows; r++) NAME(restore)(codes + r * n, scales + r * blocks, n, v + r * n);
}
#endif
