/* libgloo's all-reduce, bare, measured as `phalanx bench allreduce` measures its own backends: see
 * rank.rs for what happens in a window and window.rs for the lines of the conversation.
 *
 * Usage: allreduce_gloo SOCKET DIRECTORY [PROCESSOR,PROCESSOR,...], with RANK, WORLD_SIZE and
 * GLOO_SOCKET_IFNAME in the environment; ranks meet in the directory.
 */
#include <stdexcept>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include <sched.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <gloo/allreduce.h>
#include <gloo/barrier.h>
#include <gloo/rendezvous/context.h>
#include <gloo/rendezvous/file_store.h>
#include <gloo/transport/tcp/device.h>

namespace {

constexpr int kPeriod = 5;

FILE* to_bench;
int rank, size;
uint32_t tag;
std::shared_ptr<gloo::rendezvous::Context> context;

int number(const char* name) {
  const char* value = getenv(name);
  if (!value) throw std::runtime_error(std::string("no ") + name);
  return atoi(value);
}

void pin(const char* processors) {
  std::string list = processors;
  char *rest = &list[0], *item = nullptr;
  for (int i = rank; i >= 0; i--) item = strsep(&rest, ",");
  if (!item) throw std::runtime_error("there are fewer processors than ranks");
  cpu_set_t set;
  CPU_ZERO(&set);
  CPU_SET(atoi(item), &set);
  if (sched_setaffinity(0, sizeof set, &set) != 0) throw std::runtime_error("cannot pin");
}

// As ProcessGroupGloo sums: plainly.
void sum(void* out, const void* a, const void* b, size_t len) {
  auto to = static_cast<float*>(out);
  auto x = static_cast<const float*>(a), y = static_cast<const float*>(b);
  for (size_t i = 0; i < len; i++) to[i] = x[i] + y[i];
}

void reduce(float* data, size_t len) {
  gloo::AllreduceOptions options(context);
  options.setOutput(data, len);
  options.setReduceFunction(
      static_cast<void (*)(void*, const void*, const void*, size_t)>(sum));
  options.setTag(tag++);
  gloo::allreduce(options);
}

void barrier() {
  gloo::BarrierOptions options(context);
  options.setTag(tag++);
  gloo::barrier(options);
}

float all(int one) { return float(one) * float(size * (size + 1) / 2); }

void window(size_t bytes, int iters, int warmup, int with_barrier, int batch) {
  size_t len = bytes / sizeof(float);
  void* memory = nullptr;
  if (posix_memalign(&memory, 64, bytes) != 0) throw std::bad_alloc();
  std::unique_ptr<void, decltype(&free)> keep(memory, free);
  float* data = static_cast<float*>(memory);
  std::vector<long long> times;
  long wrong = 0;

  for (size_t i = 0; i < len; i++) data[i] = float((int(i % kPeriod) + 1) * (rank + 1));
  reduce(data, len);
  for (size_t i = 0; i < len; i++) wrong += data[i] != all(int(i % kPeriod) + 1);

  auto start = std::chrono::steady_clock::now();
  for (int iter = -warmup; iter < iters; iter++) {
    int one = (iter + warmup) % kPeriod + 1;
    for (size_t i = 0; i < len; i++) data[i] = float(one * (rank + 1));
    if (with_barrier) barrier();
    if ((iter + warmup) % batch == 0) start = std::chrono::steady_clock::now();
    reduce(data, len);
    if (iter >= 0 && (iter + 1) % batch == 0) {
      std::chrono::nanoseconds took = std::chrono::steady_clock::now() - start;
      times.push_back(took.count() / batch);
    }
    for (size_t at : {size_t(0), len / 2, len - 1, size_t(iter + warmup) * 7919 % len})
      wrong += data[at] != all(one);
  }

  fprintf(to_bench, "done %ld", wrong);
  for (long long time : times) fprintf(to_bench, " %lld", time);
  fprintf(to_bench, "\n");
  fflush(to_bench);
}

void run(int argc, char** argv) {
  rank = number("RANK");
  size = number("WORLD_SIZE");
  if (argc > 3 && *argv[3]) pin(argv[3]);
  gloo::transport::tcp::attr attributes;
  attributes.iface = getenv("GLOO_SOCKET_IFNAME") ? getenv("GLOO_SOCKET_IFNAME") : "lo";
  auto device = gloo::transport::tcp::CreateDevice(attributes);
  context = std::make_shared<gloo::rendezvous::Context>(rank, size);
  gloo::rendezvous::FileStore store(argv[2]);
  context->connectFullMesh(store, device);
  fprintf(to_bench, "hello %d libgloo, bare\n", rank);
  fflush(to_bench);

  FILE* from_bench = fdopen(dup(fileno(to_bench)), "r");
  char line[256], dtype[16], memory[16];
  while (fgets(line, sizeof line, from_bench)) {
    size_t bytes;
    int iters, warmup, with_barrier, batch;
    if (sscanf(line, "run %zu %15s %15s %d %d %d %d", &bytes, dtype, memory, &iters, &warmup,
               &with_barrier, &batch) != 7)
      throw std::runtime_error("not a window");
    if (strcmp(dtype, "f32") != 0) throw std::runtime_error("only f32");
    window(bytes, iters, warmup, with_barrier, batch);
  }
  barrier();
}

}  // namespace

int main(int argc, char** argv) {
  sockaddr_un address = {};
  address.sun_family = AF_UNIX;
  if (argc < 3 || strlen(argv[1]) >= sizeof address.sun_path) return 2;
  strcpy(address.sun_path, argv[1]);
  int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
  if (connect(fd, reinterpret_cast<sockaddr*>(&address), sizeof address) != 0) return 2;
  to_bench = fdopen(fd, "w");
  try {
    run(argc, argv);
  } catch (const std::exception& what) {
    std::string text = what.what();
    for (char& c : text)
      if (c == '\n') c = ' ';
    fprintf(to_bench, "fail %s\n", text.c_str());
    fflush(to_bench);
    return 1;
  }
  return 0;
}
