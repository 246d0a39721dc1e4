/* int8 with a scale per block of 256 numbers, and int4 with one per 64; encodings.py says the same in torch.
 *
 * The file includes itself, once for float and once for double. */
#ifndef T
#include <math.h>
#include <stdint.h>
#include <string.h>

enum { BLOCK = 256, LARGEST = 127, EVEN = 95, OUTLIERS = 8, OUTLYING = 32, TIMES = 3, SHORT = 64, FINEST = 7 };

/* The number of steps that a code stands for in a block with outliers: 0 to 95, and then 128, 192, 256, 384, ... */
static inline int32_t steep(int32_t code) { return code <= EVEN ? code : (2 + code % 2) << (6 + (code - EVEN - 1) / 2); }
static const float STEEPEST = 3 << 21; /* that of 127 */

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

static inline T NAME(number)(BITS a) {
    T v;
    memcpy(&v, &a, sizeof v);
    return v;
}

static inline BITS NAME(bits)(T v) {
    BITS a;
    memcpy(&a, &v, sizeof a);
    return a;
}

/* n numbers to codes and scales. Without its sign a number compares as its bits do; what is not a number is the
 * largest. */
static void NAME(quantize)(const T *v, int64_t n, int8_t *codes, uint16_t *scales) {
    for (int64_t b = 0; b < n; b += BLOCK, v += BLOCK, codes += BLOCK, scales++) {
        const int64_t size = n - b < BLOCK ? n - b : BLOCK;
        BITS a[BLOCK], top = 0;
        for (int64_t i = 0; i < size; i++) {
            a[i] = NAME(bits)(v[i]) & ((BITS)-1 >> 1);
            top = a[i] > top ? a[i] : top;
        }
        const T most = NAME(number)(top);
        T rest = most; /* the largest one that is no outlier */
        for (int k = 0; k < TIMES; k++) {
            const BITS limit = NAME(bits)(rest / OUTLYING);
            BITS below = 0, outliers = 0;
            for (int64_t i = 0; i < size; i++) outliers += a[i] >= limit;
            if (outliers > OUTLIERS) break;
            for (int64_t i = 0; i < size; i++) below = a[i] < limit && a[i] > below ? a[i] : below;
            if (!below) break;
            rest = NAME(number)(below);
        }
        const int steeply = rest < most;
        T scale = steeply ? rest / EVEN : most / LARGEST;
        if (steeply && most / STEEPEST > scale) scale = most / STEEPEST;
        *scales = rounded((float)scale);
        const T step = widened(*scales), unit = step > 0 ? step : 1;
        if (!(step < INFINITY)) { /* neighbours refuse it by its scale */
            memset(codes, 0, (size_t)size);
            continue;
        }
        for (int64_t i = 0; i < size; i++) {
            T q = RINT(v[i] / unit);
            q = q < LARGEST ? q : LARGEST;
            q = q > -LARGEST ? q : -LARGEST;
            codes[i] = (int8_t)(int32_t)q;
        }
        if (!steeply) continue;
        *scales |= 0x8000; /* a negative scale */
        for (int64_t i = 0; i < size; i++) {
            if (codes[i] <= EVEN && codes[i] >= -EVEN) continue;
            const T q = NAME(number)(a[i]) / unit;
            int code = EVEN;
            while (code < LARGEST && 2 * q > (T)steep(code) + (T)steep(code + 1)) code++;
            codes[i] = (int8_t)(v[i] < 0 ? -code : code);
        }
    }
}

/* Back again. */
static void NAME(restore)(const int8_t *codes, const uint16_t *scales, int64_t n, T *v) {
    for (int64_t b = 0; b < n; b += BLOCK, v += BLOCK, codes += BLOCK, scales++) {
        const int64_t size = n - b < BLOCK ? n - b : BLOCK;
        const T scale = widened(*scales & 0x7fff);
        for (int64_t i = 0; i < size; i++) v[i] = (T)codes[i] * scale;
        if (!(*scales & 0x8000)) continue;
        for (int64_t i = 0; i < size; i++) {
            if (codes[i] > EVEN) v[i] = (T)steep(codes[i]) * scale;
            if (codes[i] < -EVEN) v[i] = (T)-steep(-codes[i]) * scale;
        }
    }
}

/* n numbers to pairs of codes, 8 more than they are, and scales. */
static void NAME(pack)(const T *v, int64_t n, uint8_t *pairs, uint16_t *scales) {
    for (int64_t b = 0; b < n; b += SHORT, v += SHORT, pairs += SHORT / 2, scales++) {
        const int64_t size = n - b < SHORT ? n - b : SHORT;
        uint8_t codes[SHORT];
        BITS top = 0;
        for (int64_t i = 0; i < size; i++) {
            const BITS a = NAME(bits)(v[i]) & ((BITS)-1 >> 1);
            top = a > top ? a : top;
        }
        *scales = rounded((float)(NAME(number)(top) / FINEST));
        const T step = widened(*scales), unit = step > 0 ? step : 1;
        memset(codes, FINEST + 1, SHORT);
        for (int64_t i = 0; i < size && step < INFINITY; i++) {
            T q = RINT(v[i] / unit);
            q = q < FINEST ? q : FINEST;
            q = q > -FINEST ? q : -FINEST;
            codes[i] = (uint8_t)((int32_t)q + FINEST + 1);
        }
        for (int64_t i = 0; i < size; i += 2) pairs[i / 2] = (uint8_t)(codes[i] | codes[i + 1] << 4);
    }
}

static void NAME(unpack)(const uint8_t *pairs, const uint16_t *scales, int64_t n, T *v) {
    for (int64_t b = 0; b < n; b += SHORT, v += SHORT, pairs += SHORT / 2, scales++) {
        const int64_t size = n - b < SHORT ? n - b : SHORT;
        const T scale = widened(*scales);
        for (int64_t i = 0; i < size; i++) v[i] = (T)((pairs[i / 2] >> 4 * (i & 1) & 15) - FINEST - 1) * scale;
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

void NAME(klatsch_pack)(const T *v, int64_t rows, int64_t n, uint8_t *pairs, uint16_t *scales) {
    const int64_t blocks = (n + SHORT - 1) / SHORT, bytes = (n + 1) / 2;
    for (int64_t r = 0; r < rows; r++) NAME(pack)(v + r * n, n, pairs + r * bytes, scales + r * blocks);
}

void NAME(klatsch_unpack)(const uint8_t *pairs, const uint16_t *scales, int64_t rows, int64_t n, T *v) {
    const int64_t blocks = (n + SHORT - 1) / SHORT, bytes = (n + 1) / 2;
    for (int64_t r = 0; r < rows; r++) NAME(unpack)(pairs + r * bytes, scales + r * blocks, n, v + r * n);
}
#endif
