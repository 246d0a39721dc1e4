/* A GPU on a CPU: every thread of a cluster is a thread here, and clusters run one after the other.  CLUSTER is the
 * number of blocks in a cluster; the source of a kernel follows this file.  Shared memory begins as NaN. */
#include <barrier>
#include <cmath>
#include <cstdlib>
#include <thread>
#include <utility>
#include <vector>

#define EMULATED
#define __global__
#define __device__
#define __cluster_dims__(...)
#define __launch_bounds__(...)
#define __align__(n) alignas(n)
using std::cos, std::log, std::sin, std::sqrt;

static thread_local struct { int x; } threadIdx, blockIdx, blockDim;
static thread_local unsigned char *memory; /* of the thread's block */
static unsigned char *all_memory;
static size_t shared_bytes;
static std::barrier<> *cluster, *blocks[CLUSTER];
static thread_local std::barrier<>::arrival_token *token;

static void __syncthreads() { blocks[blockIdx.x % CLUSTER]->arrive_and_wait(); }
static void arrive() { token = new auto(cluster->arrive()); }
static void wait() {
    cluster->wait(std::move(*token));
    delete token;
}
template <class V> static const V *there(const V *here, int block) {
    return (const V *)((const unsigned char *)here - memory + all_memory + block * shared_bytes);
}
template <class... A, size_t... K> static void call(void (*kernel)(A...), void **given, std::index_sequence<K...>) {
    kernel(*(A *)given[K]...);
}
template <class... A>
static void launch(void (*kernel)(A...), int count, int threads, size_t shared, void **given) {
    shared_bytes = (shared + 63) / 64 * 64;
    for (int first = 0; first < count; first += CLUSTER) {
        all_memory = (unsigned char *)std::aligned_alloc(64, CLUSTER * shared_bytes + 64);
        for (size_t k = 0; k < CLUSTER * shared_bytes / 8; k++) ((double *)all_memory)[k] = NAN;
        cluster = new std::barrier<>(CLUSTER * threads);
        for (auto &block : blocks) block = new std::barrier<>(threads);
        std::vector<std::thread> running;
        for (int t = 0; t < CLUSTER * threads; t++)
            running.emplace_back([=] {
                threadIdx.x = t % threads, blockIdx.x = first + t / threads, blockDim.x = threads;
                memory = all_memory + t / threads * shared_bytes;
                call(kernel, given, std::make_index_sequence<sizeof...(A)>());
            });
        for (auto &thread : running) thread.join();
        for (auto &block : blocks) delete block;
        delete cluster;
        std::free(all_memory);
    }
}
