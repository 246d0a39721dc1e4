/* Rounds of decentralised learning on a GPU, many per launch.  A cluster of BLOCKS thread blocks has the nodes of one
 * network, for some of its columns, in shared memory; clusters never wait for each other.
 *
 * klatsch.simulation.fused defines T and the capitals, and writes the rule down as C: for a number `e` of each level.
 * In level 0 a thread keeps the gradients of TILE columns and two parameters in registers, so that each number of H,
 * which comes from the L2 cache, serves TILE columns.  Every other level begins with a flow, which reads the neighbours'
 * rows from the blocks of the cluster. */
struct __align__(16) Link { double weight; int block, slot; };
struct __align__(16) Job { int node, nodes, column, columns, first, period, network, steady; };
struct __align__(STEP * sizeof(T)) Several { T v[STEP]; };

#ifndef EMULATED /* as tests do, on a CPU */
extern __shared__ __align__(16) unsigned char memory[];
__device__ __forceinline__ void arrive() { asm volatile("barrier.cluster.arrive.release;" ::: "memory"); }
__device__ __forceinline__ void wait() { asm volatile("barrier.cluster.wait.acquire;" ::: "memory"); }
__device__ __forceinline__ const T *there(const T *here, int block) {
    const T *other;
    asm("mapa.u64 %0, %1, %2;" : "=l"(other) : "l"(here), "r"(block));
    return other;
}
#endif
#define EACH(e, count) for (int e = threadIdx.x; e < (count); e += blockDim.x)
#define STATE(f, e) state[(((f) * M + node + (e) / n) * C + job.column) * D + (e) % n]
#define COEF(k) now[(k) * stride + c]
/* A thread goes through the nodes with two numbers of a row: links and coefficients serve both. */
#define LEVEL(SOURCE, RESULT, VALUE, DECLARE, LOAD, ...)                                                     \
    arrive(), wait();                                                                                        \
    for (int q0 = threadIdx.x % width; q0 < n && threadIdx.x < width * stripes; q0 += 2 * width) {           \
        const int q[2] = {q0, q0 + width < n ? q0 + width : q0};                                             \
        DECLARE                                                                                              \
        for (int s = 0; s < 2; s++) { const int c = q[s] / D; (void)c; LOAD }                                \
        for (int i = threadIdx.x / width; i < mine; i += stripes) {                                          \
            const T own[2] = {SOURCE[i * n + q[0]], SOURCE[i * n + q[1]]};                                   \
            T sum[2] = {0, 0};                                                                               \
            for (int l = begin[i]; l < begin[i + 1]; l++) {                                                  \
                const Link link = links[l];                                                                  \
                const T *v = (link.block == rank ? SOURCE : there(SOURCE, link.block)) + link.slot * n;      \
                for (int s = 0; s < 2; s++) sum[s] += (T)link.weight * (v[q[s]] - own[s]);                   \
            }                                                                                                \
            for (int s = 0; s < (q0 + width < n ? 2 : 1); s++) {                                             \
                const int e = i * n + q[s];                                                                  \
                const T RESULT = VALUE;                                                                      \
                __VA_ARGS__                                                                                  \
            }                                                                                                \
        }                                                                                                    \
    }

/* H is symmetric; the noise is the last extra row; one network stands for all whose coefficients are alike; links are
 * CSR for each network, (period, nodes + 1). */
extern "C" __global__ void __cluster_dims__(BLOCKS, 1, 1) __launch_bounds__(THREADS, 1) klatsch_rounds(
    T *state /* (fields, M, C, D) */, const T *__restrict__ H /* (M, D, D) */,
    const T *__restrict__ rows /* (M, EXTRAS - 1, D) */, const T *__restrict__ noise /* (rounds, M, D) */,
    const T *__restrict__ mult /* (C, EXTRAS) */, const T *__restrict__ coef /* (rounds, coefs, networks, C) */,
    const int *__restrict__ first, const Link *__restrict__ links, const Job *__restrict__ jobs, long long rounds,
    long long done, long long M, long long C, long long coefs, long long networks) {
    const Job job = jobs[blockIdx.x / BLOCKS];
    const int rank = blockIdx.x % BLOCKS, n = job.columns * D, per = (job.nodes + BLOCKS - 1) / BLOCKS;
    const int left = job.nodes - rank * per, mine = left < 0 ? 0 : left < per ? left : per;
    const long long node = job.node + rank * per, stride = networks * C;
    const int half = (D + 1) / 2, lanes = half * ((job.columns + TILE - 1) / TILE), at_once = blockDim.x / lanes;
    const int c0 = threadIdx.x % lanes / half * TILE, j = threadIdx.x % lanes % half, j2 = j + half < D ? j + half : j;
    const int width = (n + 1) / 2 < blockDim.x ? (n + 1) / 2 : blockDim.x, stripes = blockDim.x / width;
    BUFFERS(((T *)memory), per * n)
    T *const scale = (T *)memory + COUNT * per * n, *const field[] = FIELDS;
    EACH(k, job.columns * EXTRAS) scale[k] = mult[job.column * EXTRAS + k];
    for (int f = 0; f < sizeof field / sizeof *field; f++)
        EACH(e, mine * n) field[f][e] = STATE(f, e);
    arrive();

    for (long long t = 0; t < rounds; t++) {
        const T *const now = coef + (t * coefs * networks + (networks > 1 ? job.network : 0)) * C + job.column;
        const int *const begin = first + job.first + (job.steady * done + t) % job.period * (job.nodes + 1) + rank * per;
        bool waiting = true; /* until the other blocks have read what they mix */
        __syncthreads();
        if (BEFORE) {
            wait();
            waiting = false;
            EACH(e, mine * n) { const int c = e % n / D, s = 0; POINT }
            __syncthreads();
        }
        for (int i0 = 0; i0 < mine; i0 += at_once) {
            const int i = i0 + threadIdx.x / lanes;
            const bool busy = threadIdx.x < at_once * lanes && i < mine;
            T sum[TILE][2] = {};
            if (busy) {
                const T *const x = QUERY + (i * job.columns + c0) * D, *const h = H + (node + i) * D * D;
                T a[DEPTH][2], ahead[DEPTH][2];
                for (int u = 0; u < DEPTH; u++) ahead[u][0] = h[u * D + j], ahead[u][1] = h[u * D + j2];
#pragma unroll 1
                for (int k = 0; k < D; k += DEPTH) {
                    for (int u = 0; u < DEPTH; u++) a[u][0] = ahead[u][0], a[u][1] = ahead[u][1];
                    if (k + DEPTH < D)
                        for (int u = 0; u < DEPTH; u++)
                            ahead[u][0] = h[(k + DEPTH + u) * D + j], ahead[u][1] = h[(k + DEPTH + u) * D + j2];
#pragma unroll
                    for (int u = 0; u < DEPTH; u += STEP)
#pragma unroll
                        for (int c = 0; c < TILE; c++) {
                            const Several b = *(const Several *)(x + c * D + k + u);
                            for (int p = 0; p < STEP; p++)
                                sum[c][0] += b.v[p] * a[u + p][0], sum[c][1] += b.v[p] * a[u + p][1];
                        }
                }
#pragma unroll
                for (int r = 0; r < EXTRAS; r++) {
                    const T *const extra = r < EXTRAS - 1 ? rows + ((node + i) * (EXTRAS - 1) + r) * D
                                                          : noise + (t * M + node + i) * D;
                    const T both[2] = {extra[j], extra[j2]};
#pragma unroll
                    for (int c = 0; c < TILE; c++)
                        for (int s = 0; s < 2; s++) sum[c][s] += scale[(c0 + c) * EXTRAS + r] * both[s];
                }
            }
            __syncthreads(); /* the query may be overwritten */
            if (waiting) wait();
            waiting = false;
#pragma unroll
            for (int k = 0; k < TILE; k++)
                if (const int c = c0 + k; busy && c < job.columns) {
                    DECLARE_0
                    for (int s = 0; s < 2; s++) { LOAD_0 }
                    for (int s = 0; s < (j + half < D ? 2 : 1); s++) {
                        const int e = (i * job.columns + c) * D + (s ? j2 : j);
                        const T GRADIENT = sum[k][s];
                        LEVEL_0
                    }
                }
        }
        if (waiting) wait();
        LEVELS
        TURN
        arrive();
    }
    wait();
    T *const last[] = FIELDS;
    for (int f = 0; f < sizeof last / sizeof *last; f++)
        EACH(e, mine * n) STATE(f, e) = last[f][e];
}
