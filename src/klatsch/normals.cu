/* Standard normals by their addresses, as klatsch.problems.draws finds them, which defines T. */
typedef unsigned long long bits;
__device__ bits hashed(bits z) {
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    return z ^ (z >> 31);
}
extern "C" __global__ void klatsch_normals(T *out, const bits *seeds, const bits *t, const bits *nodes, long long own,
                                           long long purpose, long long rounds, long long M, long long size) {
    const bits golden = 0x9E3779B97F4A7C15u;
    const long long pairs = (size + 1) / 2, k = blockIdx.x * (long long)blockDim.x + threadIdx.x;
    const long long p = k % pairs, node = k / pairs % M, round = k / pairs / M;
    if (round >= rounds) return;
    bits key = hashed(seeds[own ? node : 0] * golden + purpose + 1);
    key = hashed(hashed(hashed(key + t[round] * golden) + nodes[node] * golden) + (p + 1) * golden);
    const T radius = sqrt((T)-2 * log(((T)(key >> 32) + (T)0.5) * (T)0x1p-32));
    const T angle = (T)(key & 0xFFFFFFFFu) * (T)(2 * 3.14159265358979323846 * 0x1p-32);
    out[(round * M + node) * size + p] = radius * cos(angle);
    if (p + pairs < size) out[(round * M + node) * size + p + pairs] = radius * sin(angle);
}
