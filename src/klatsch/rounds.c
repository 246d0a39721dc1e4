/* Rounds of decentralised learning on M nodes, for a block of C independent columns
 * (experiments) of d parameters each.  Every vector is an (M, C, d) array.
 *
 * Where the time goes: one round reads all of H (M*d*d numbers) and a few (M, C, d) arrays,
 * and does little arithmetic on each.  Hence everything here is about locality: the caller
 * picks C so that H and the arrays stay in L2 over all rounds, and inside a round all work
 * that one node can do without its neighbours is done at once, while its row is in L1.
 *
 * The file includes itself, once for float and once for double. */
#ifndef T
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

/* The widest vectors the machine has.  A tile of COLS x VECS accumulators, VECS vectors of H
 * and a broadcast have to fit its registers (32 on AVX-512 and ARM, else 16). */
#if defined(__AVX512F__)
enum { BYTES = 64, COLS = 6, VECS = 4 };
#elif defined(__AVX__)
enum { BYTES = 32, COLS = 6, VECS = 2 };
#elif defined(__ARM_NEON)
enum { BYTES = 16, COLS = 6, VECS = 4 };
#else
enum { BYTES = 16, COLS = 6, VECS = 2 };
#endif
enum { AHEAD = 16 }; /* rows of H to prefetch: the hardware's own guess is too late */
enum { MAX_INPUTS = 6, MAX_REGISTERS = 64, LIN = 0, MIX = 1, FLOW = 2 };
#define INLINE static inline __attribute__((always_inline))

/* LIN: out = sum_k coef[k] * in[k], elementwise.  FLOW: out_i = sum_j P_ij (v_j - v_i).
 * MIX: out_i = v_i + FLOW. */
typedef struct { int32_t kind, level, out, inputs, in[MAX_INPUTS], coef[MAX_INPUTS]; } operation;

#define job NAME(job)
#define vec NAME(vec)     /* a vector in a register */
#define loose NAME(loose) /* a vector in memory, at any address */
#define bits NAME(bits)   /* the same as whole numbers */
#define V ((int64_t)(BYTES / sizeof(T)))
#define GET(p) (*(const loose *)(p))
#define PUT(p) (*(loose *)(p))
#define TILES(n) TILE(n, 1) TILE(n, 2) TILE(n, 3) TILE(n, 4)
#define TILE(n, m) case 8 * n + m: NAME(tile)(n, m, depth, x + c * depth, H + j, ldh, extras, \
                                   mult + c * extras, extra + j, pad, width, out + c * width + j); break;
#define LIN_CASE(k) case k: NAME(lin_of)(k, n, in, coef, out); break;

#define T float
#define BITS int32_t
#define NAME(x) x##_f32
#include __FILE__
#undef T
#undef BITS
#undef NAME
#define T double
#define BITS int64_t
#define NAME(x) x##_f64
#include __FILE__

#else /* ------------------------------------------------- once per number type T */

typedef T vec __attribute__((vector_size(BYTES)));
typedef T loose __attribute__((vector_size(BYTES), aligned(sizeof(T)), may_alias));
typedef BITS bits __attribute__((vector_size(BYTES)));

typedef struct {
    int64_t rounds, nodes, columns, dim, rank;  /* rank: R, how many rows (may be 0) */
    int64_t registers, buffers, scratch_rows, operations, coefs;
    int64_t query, gradient;        /* registers: where the gradient is taken, where it goes */
    int64_t before;                 /* operations that come before the gradient, LINs of level 0 */
    int64_t period, first_phase;
    int64_t samples, batch;         /* of logistic regression, of a node; 0 where gradients are quadratic */
    const T *H;                     /* (M, d, d) symmetric, and BYTES readable bytes behind it; or (M, samples, d) */
    const T *rows, *mult;           /* (M, R, d), (C, R) */
    const T *noise, *sigma;         /* (rounds, M, d) or NULL, (C); sigma is l2 in logistic regression */
    const int64_t *drawn;           /* (rounds, M, batch) numbers of samples, or NULL */
    const T *coef;                  /* (rounds, coefs, C) */
    const operation *op;            /* sorted by level */
    const int32_t *first, *neighbour; /* CSR, per phase: (period, M + 1), counting through */
    const T *weight;
    const int32_t *buffer_of;       /* per register: its buffer, or -1 - scratch row */
    const int32_t *turn;            /* after a round, buffer[b] becomes buffer[turn[b]] */
    T **buffer;                     /* (buffers) arrays (M, C, d); permuted on return */
} job;

/* acc[c] += sum_k a[c, k] * b[k], for nc columns and nv vectors; all loops but k unroll. */
INLINE void NAME(multiply)(vec acc[COLS][4], const int nc, const int nv, int64_t depth,
                           const T *a, int64_t lda, const T *b, int64_t ldb) {
    for (int64_t k = 0; k < depth; k++, b += ldb) {
        vec h[4];
        for (int v = 0; v < nv; v++) __builtin_prefetch(b + AHEAD * ldb + v * V);
        for (int v = 0; v < nv; v++) h[v] = GET(b + v * V);
        __asm__ volatile("" ::: "memory"); /* gcc would load h anew for every column */
        for (int c = 0; c < nc; c++)
            for (int v = 0; v < nv; v++) acc[c][v] += a[c * lda + k] * h[v];
    }
}

INLINE void NAME(tile)(const int nc, const int nv, int64_t depth, const T *x, const T *H, int64_t ldh, int64_t extras,
                       const T *mult, const T *extra, int64_t pad, int64_t width, T *out) {
    vec acc[COLS][4] = {0};
    NAME(multiply)(acc, nc, nv, depth, x, depth, H, ldh);
    NAME(multiply)(acc, nc, nv, extras, mult, extras, extra, pad);
    for (int c = 0; c < nc; c++)
        for (int v = 0; v < nv; v++) PUT(out + c * width + v * V) = acc[c][v];
}

/* out(C, width) = x(C, depth) @ H + mult(C, extras) @ extra(extras, pad).  The last vector of a row
 * reaches over its end: it reads lanes of whatever follows and writes them into the start of
 * the next column.  Going through the columns upwards and through the vectors of a column
 * downwards, these lanes are overwritten by the right ones later (out has BYTES to spare). */
static void NAME(product)(int64_t C, int64_t depth, int64_t width, const T *x, const T *H, int64_t ldh, int64_t extras,
                          const T *mult, const T *extra, int64_t pad, T *out) {
    const int64_t vectors = (width + V - 1) / V, panels = (vectors + VECS - 1) / VECS;
    const int64_t groups = (C + COLS - 1) / COLS;
    for (int64_t g = 0; g < groups; g++) {
        const int64_t c = g * C / groups, nc = (g + 1) * C / groups - c;
        for (int64_t p = panels - 1; p >= 0; p--) {
            const int64_t j = p * VECS * V, nv = p < panels - 1 ? VECS : vectors - p * VECS;
            switch (8 * nc + nv) { TILES(1) TILES(2) TILES(3) TILES(4) TILES(5) TILES(6) }
        }
    }
}

/* 1 / (1 + exp(z)), to rounding: exp(z) = 2^k exp(r) with |r| < 0.35, by its power series. */
INLINE vec NAME(doubt)(vec z) {
    const int single = sizeof(T) == 4, places = single ? 23 : 52;
    const vec most = (vec){0} + (T)(single ? 80 : 700), whole = (vec){0} + (T)(single ? 0x1.8p23 : 0x1.8p52);
    const bits above = z > most, below = z < -most;
    z = (vec)(((bits)z & ~above & ~below) | ((bits)most & above) | ((bits)-most & below));
    const vec shifted = z * (T)0x1.71547652b82fep0 + whole, k = shifted - whole; /* rounds z / log 2 */
    const T log2 = single ? 0x1.62e4p-1 : 0x1.62e42fefa38p-1, rest = single ? 0x1.7f7d1cp-20 : 0x1.ef35793c7673p-45;
    const vec r = z - k * log2 - k * rest;
    vec sum = (vec){0} + 1;
    for (int n = single ? 8 : 14; n > 0; n--) sum = sum * r * ((T)1 / n) + 1;
    const bits power = ((bits)shifted - (bits)whole + (single ? 127 : 1023)) << places;
    return 1 / (1 + sum * (vec)power);
}

/* Gradients (C, d) of logistic regression at x: l2 x - a(B, d)' / (1 + exp(a x)) / B, of the samples drawn.  `room` is
 * for the samples, for the same column by column, and for a number of each sample and column. */
static void NAME(slope)(const job *q, int64_t i, const int64_t *drawn, const T *x, T *room, T *out) {
    const int64_t C = q->columns, d = q->dim, B = q->batch, pad = (d + V - 1) / V * V, wide = (B + V - 1) / V * V;
    T *const rows = room, *const turned = rows + B * pad, *const wrong = turned + d * wide;
    for (int64_t b = 0; b < B; b++) {
        const T *const sample = q->H + (i * q->samples + drawn[b]) * d;
        memcpy(rows + b * pad, sample, d * sizeof(T));
        for (int64_t k = 0; k < d; k++) turned[k * wide + b] = sample[k];
    }
    NAME(product)(C, d, B, x, turned, wide, 0, NULL, NULL, 0, wrong);
    for (int64_t e = 0; e < C * B; e += V) PUT(wrong + e) = NAME(doubt)(GET(wrong + e)) * ((T)-1 / B);
    NAME(product)(C, B, d, wrong, rows, pad, 0, NULL, NULL, 0, out);
    for (int64_t c = 0; c < C; c++)
        for (int64_t k = 0; k < d; k++) out[c * d + k] += q->sigma[c] * x[c * d + k];
}

/* Both kinds of operation work on a row of n = C*d numbers, each number on its own (so that a
 * LIN may write over its input, and a column never feels another one).  Coefficients come
 * spread out, one per number, which saves dealing with the ends of columns. */
INLINE vec NAME(sum)(const int inputs, int64_t e, const T *const *in, const T *const *coef) {
    vec sum = GET(coef[0] + e) * GET(in[0] + e);
    for (int k = 1; k < inputs; k++) sum += GET(coef[k] + e) * GET(in[k] + e);
    return sum;
}

/* A row may end inside a vector.  Its last vector is then moved back to overlap the one before;
 * it is computed first, since out may be one of the inputs. */
INLINE void NAME(lin_of)(const int inputs, int64_t n, const T *const *in, const T *const *coef,
                         T *out) {
    if (n >= V) {
        const vec last = NAME(sum)(inputs, n - V, in, coef);
        for (int64_t e = 0; e < n - V; e += V) PUT(out + e) = NAME(sum)(inputs, e, in, coef);
        PUT(out + n - V) = last;
    } else for (int64_t e = 0; e < n; e++) {
        T sum = coef[0][e] * in[0][e];
        for (int k = 1; k < inputs; k++) sum += coef[k][e] * in[k][e];
        out[e] = sum;
    }
}

static void NAME(lin)(int inputs, int64_t n, const T *const *in, const T *const *coef, T *out) {
    switch (inputs) { LIN_CASE(1) LIN_CASE(2) LIN_CASE(3) LIN_CASE(4) LIN_CASE(5) LIN_CASE(6) }
}

/* nv vectors from number e on, of node i; alone: the flow without the value itself */
INLINE void NAME(mix_of)(const int alone, const int nv, int64_t e, int64_t n, int64_t i, const T *v, int degree,
                         const int32_t *neighbour, const T *weight, T *out) {
    vec own[4], sum[4];
    for (int k = 0; k < nv; k++) own[k] = GET(v + i * n + e + k * V);
    for (int k = 0; k < nv; k++) sum[k] = alone ? (vec){0} : own[k];
    for (int j = 0; j < degree; j++) {
        const T *other = v + neighbour[j] * n + e;
        for (int k = 0; k < nv; k++) sum[k] += weight[j] * (GET(other + k * V) - own[k]);
    }
    for (int k = 0; k < nv; k++) PUT(out + e + k * V) = sum[k];
}

static void NAME(mix)(const int alone, int64_t n, int64_t i, const T *v, int degree, const int32_t *neighbour,
                      const T *weight, T *out) {
    int64_t e = 0;
    for (; e + 4 * V <= n; e += 4 * V) NAME(mix_of)(alone, 4, e, n, i, v, degree, neighbour, weight, out);
    for (; e + V <= n; e += V) NAME(mix_of)(alone, 1, e, n, i, v, degree, neighbour, weight, out);
    if (e < n && n >= V) NAME(mix_of)(alone, 1, n - V, n, i, v, degree, neighbour, weight, out);
    else for (; e < n; e++) {
        T own = v[i * n + e], sum = alone ? 0 : own;
        for (int j = 0; j < degree; j++) sum += weight[j] * (v[neighbour[j] * n + e] - own);
        out[e] = sum;
    }
}

/* Operations from p up to end on row i; row i of register r is at base[r] + i * step[r]. */
INLINE void NAME(operate)(const job *q, const operation *p, const operation *end, int64_t i,
                          T *const *base, const int64_t *step, const int32_t *first, const T *spread) {
    const int64_t n = q->columns * q->dim;
    const int degree = first[i + 1] - first[i];
    const int32_t *const neighbour = q->neighbour + first[i];
    const T *const weight = q->weight + first[i];
    for (; p < end; p++) {
        T *const out = base[p->out] + i * step[p->out];
        const T *const v = base[p->in[0]];
        if (p->kind == MIX) NAME(mix)(0, n, i, v, degree, neighbour, weight, out);
        else if (p->kind == FLOW) NAME(mix)(1, n, i, v, degree, neighbour, weight, out);
        else {
            const T *in[MAX_INPUTS], *coef[MAX_INPUTS];
            for (int k = 0; k < p->inputs; k++) {
                in[k] = base[p->in[k]] + i * step[p->in[k]];
                coef[k] = spread + p->coef[k] * n;
            }
            NAME(lin)(p->inputs, n, in, coef, out);
        }
    }
}

/* Returns 0, or -1 when out of memory or of registers. */
int NAME(klatsch_rounds)(const job *q) {
    const int64_t M = q->nodes, C = q->columns, d = q->dim, n = C * d, R = q->rank;
    const int64_t extras = R + (q->noise != NULL);
    if (q->registers > MAX_REGISTERS || q->buffers > MAX_REGISTERS) return -1;

    /* One piece of memory: scratch rows (one more than asked for, and V numbers to spare after
     * each, see product), spread coefficients, rows and noise of a node, their multipliers, or what a slope needs. */
    const int64_t pad = (d + V - 1) / V * V, wide = (n + V - 1) / V * V + V;
    const int64_t slope = q->batch * (pad + d + C + 1) + d * V + V;
    const int64_t total = (q->scratch_rows + 1) * wide + q->coefs * n + extras * (pad + C) + slope;
    T *const scratch = aligned_alloc(BYTES, (total + V) / V * BYTES);
    if (!scratch) return -1;
    T *const spread = scratch + (q->scratch_rows + 1) * wide;
    T *const extra = spread + q->coefs * n, *const mult = extra + extras * pad, *const room = mult + extras * C;
    memset(scratch, 0, total * sizeof(T));
    for (int64_t c = 0; c < C; c++) {
        for (int64_t r = 0; r < R; r++) mult[c * extras + r] = q->mult[c * R + r];
        if (q->noise) mult[c * extras + R] = q->sigma[c];
    }

    for (int64_t t = 0; t < q->rounds; t++) {
        T *base[MAX_REGISTERS];
        int64_t step[MAX_REGISTERS];
        for (int r = 0; r < q->registers; r++) {
            const int b = q->buffer_of[r];
            base[r] = b >= 0 ? q->buffer[b] : scratch + (-1 - b) * wide;
            step[r] = b >= 0 ? n : 0;
        }
        for (int64_t k = 0; k < q->coefs * C; k++)
            for (int64_t e = 0; e < d; e++) spread[k * d + e] = q->coef[t * q->coefs * C + k];
        const int32_t *first = q->first + (q->first_phase + t) % q->period * (M + 1);
        const operation *o = q->op, *const end = o + q->operations, *next;

        for (int level = 0; level == 0 || o < end; level++, o = next) {
            for (next = o; next < end && next->level == level; next++) {}
            for (int64_t i = 0; i < M; i++) {
                if (level == 0) { /* rows and noise act like further rows of H */
                    if (q->before) NAME(operate)(q, o, o + q->before, i, base, step, first, spread);
                    T *const out = base[q->gradient] + i * step[q->gradient];
                    T *const into = step[q->gradient] ? scratch + q->scratch_rows * wide : out;
                    for (int64_t r = 0; r < R; r++)
                        memcpy(extra + r * pad, q->rows + (i * R + r) * d, d * sizeof(T));
                    if (q->noise)
                        memcpy(extra + R * pad, q->noise + (t * M + i) * d, d * sizeof(T));
                    const T *const x = base[q->query] + i * step[q->query];
                    if (q->batch) NAME(slope)(q, i, q->drawn + (t * M + i) * q->batch, x, room, into);
                    else NAME(product)(C, d, d, x, q->H + i * d * d, d, extras, mult, extra, pad, into);
                    if (into != out) memcpy(out, into, n * sizeof(T));
                }
                NAME(operate)(q, level == 0 ? o + q->before : o, next, i, base, step, first, spread);
            }
        }
        T *turned[MAX_REGISTERS];
        for (int b = 0; b < q->buffers; b++) turned[b] = q->buffer[q->turn[b]];
        for (int b = 0; b < q->buffers; b++) q->buffer[b] = turned[b];
    }
    free(scratch);
    return 0;
}
#endif
