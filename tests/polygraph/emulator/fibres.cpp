// Runs the threads of a block as fibres, one block at a time, in an order that shows missing barriers.
//
// A barrier lets a block on when all its threads that have not ended wait there; an exchange between
// lanes lets a warp on likewise. With a seed, one warp is run for as long as it can, and left for
// another now and then: a thread that reads what another warp has yet to write then reads poison.
//
// The blocks of a cluster run beside one another. The memory of one that has not begun, or has ended,
// may not be touched, or sent to. What is sent comes at once or as late as can be: when no thread can
// go on.
#include "gpu.h"
#include <csetjmp>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <sys/mman.h>
#include <ucontext.h>
#include <unistd.h>
#include <vector>

extern "C" {
Place threadIdx, blockIdx, blockDim, gridDim;
unsigned char *gpu_shared;
}

namespace {

enum State { RUNNING, AT_BARRIER, AT_EXCHANGE, AT_CLUSTER, AT_BOX, ENDED };
const int STACK = 64 << 10;

struct Copy {
  void *to;
  const void *from;
  int bytes;
};

struct Block {
  Place place;
  unsigned char *shared;
  bool begun, ended;
};

struct Sent {
  unsigned char *to, content[16];
  unsigned bytes;
};

struct Box {
  unsigned expected, come;
  bool full;
  std::vector<Sent> late;  // what does not lie at its place before the box is full
};

struct Fibre {
  ucontext_t context;
  char *stack;
  Place place;
  Block *block;
  State state;
  int arrivals;  // at barriers of the cluster
  bool waits;    // for the last of them, now or later
  unsigned char *box;
  std::vector<std::vector<Copy>> copies;  // groups; the last one is open
};

std::map<unsigned char *, Box> boxes;
const int MOST = 8;  // blocks of a cluster
std::vector<Fibre *> fibres;
Block blocks[MOST];
ucontext_t scheduler;
int current = -1, n_blocks, padded;  // threads of a block, with what its last warp lacks
unsigned shared_bytes;
void (*entry)(void **);
void **entry_arguments;
const char *trouble;
sigjmp_buf way_out;
volatile sig_atomic_t guarding;
char message[200];
uint64_t slots[MOST * 1024][2];
uint64_t random_state;

unsigned next_random() {
  random_state = random_state * 6364136223846793005ull + 1442695040888963407ull;
  return (unsigned)(random_state >> 33);
}

void wait_as(State state) {
  const int self = current;
  fibres[self]->state = state;
  swapcontext(&fibres[self]->context, &scheduler);
}

void run_entry() {
  entry(entry_arguments);
  fibres[current]->state = ENDED;
  swapcontext(&fibres[current]->context, &scheduler);
}

void prepare(int i) {
  while ((int)fibres.size() <= i) {
    Fibre *f = new Fibre;
    f->stack = (char *)malloc(STACK);
    fibres.push_back(f);
  }
  Fibre *f = fibres[i];
  f->block = &blocks[i / padded];
  i %= padded;
  f->place = Place{i % blockDim.x, i / blockDim.x % blockDim.y, i / (blockDim.x * blockDim.y)};
  f->state = f->place.z < blockDim.z ? RUNNING : ENDED;
  f->arrivals = 0;
  f->waits = false;
  f->copies.assign(1, {});
  getcontext(&f->context);
  f->context.uc_stack.ss_sp = f->stack;
  f->context.uc_stack.ss_size = STACK;
  f->context.uc_link = &scheduler;
  makecontext(&f->context, run_entry, 0);
}

bool can_run(int warp) {
  for (int i = 32 * warp; i < 32 * warp + 32; ++i)
    if (fibres[i]->state == RUNNING) return true;
  return false;
}

void allow(const Block &b, int how) {
  if (n_blocks == 1 || !shared_bytes) return;
  const size_t page = sysconf(_SC_PAGESIZE);
  mprotect((void *)((size_t)b.shared / page * page), (shared_bytes + page - 1) / page * page, how);
}

void begin(Block &b) {
  b.begun = true;
  allow(b, PROT_READ | PROT_WRITE);
  memset(b.shared, 0xff, (shared_bytes + 15) / 16 * 16);
}

// Run each thread of `warp` until it waits or ends.
void run_warp(int warp) {
  Block &b = *fibres[32 * warp]->block;
  if (!b.begun) begin(b);
  blockIdx = b.place;
  gpu_shared = b.shared;
  for (int i = 32 * warp; i < 32 * warp + 32; ++i) {
    if (fibres[i]->state != RUNNING) continue;
    current = i;
    threadIdx = fibres[i]->place;
    swapcontext(&scheduler, &fibres[i]->context);
  }
}

// Let on the threads between `from` and `to` if all that have not ended wait as `state`.
bool release(int from, int to, State state) {
  int waiting = 0;
  for (int i = from; i < to; ++i) {
    if (fibres[i]->state == state) ++waiting;
    else if (fibres[i]->state != ENDED) return false;
  }
  for (int i = from; i < to && waiting; ++i)
    if (fibres[i]->state == state) fibres[i]->state = RUNNING;
  return waiting > 0;
}

// Let on the threads that wait where all of their cluster that have not ended have arrived.
bool release_cluster() {
  int all = 1 << 30;
  for (int i = 0; i < n_blocks * padded; ++i)
    if (fibres[i]->state != ENDED && fibres[i]->arrivals < all) all = fibres[i]->arrivals;
  bool moved = false;
  for (int i = 0; i < n_blocks * padded; ++i) {
    if (fibres[i]->state != AT_CLUSTER || fibres[i]->arrivals > all) continue;
    fibres[i]->state = RUNNING;
    moved = true;
  }
  return moved;
}

// Let all that fills a box be there, and those that wait for it go on.
bool release_box() {
  for (auto &entry : boxes) {
    Box &box = entry.second;
    if (box.full || box.come < box.expected) continue;
    box.full = true;
    for (const Sent &sent : box.late) memcpy(sent.to, sent.content, sent.bytes);
    for (Fibre *f : fibres)
      if (f->state == AT_BOX && f->box == entry.first) f->state = RUNNING;
    return true;
  }
  return false;
}

void run_cluster(bool sticky) {
  padded = (blockDim.x * blockDim.y * blockDim.z + 31) / 32 * 32;
  const int n_threads = n_blocks * padded, n_warps = n_threads / 32;
  for (int i = 0; i < n_threads; ++i) prepare(i);
  for (int i = n_threads; i < (int)fibres.size(); ++i) fibres[i]->state = ENDED;
  boxes.clear();
  int warp = 0;
  while (!trouble) {
    std::vector<int> ready;
    for (int w = 0; w < n_warps; ++w)
      if (can_run(w)) ready.push_back(w);
    if (sticky && !ready.empty()) {
      if (!can_run(warp) || next_random() % 64 == 0) warp = ready[next_random() % ready.size()];
      run_warp(warp);
    } else {
      for (int w : ready) run_warp(w);
    }
    bool moved = !ready.empty(), ended = true;
    for (int w = 0; w < n_warps; ++w) moved |= release(32 * w, 32 * w + 32, AT_EXCHANGE);
    for (int b = 0; b < n_blocks; ++b) {
      const int from = b * padded;
      moved |= release(from, from + padded, AT_BARRIER);
      if (blocks[b].ended) continue;
      bool over = true;
      for (int i = from; i < from + padded && over; ++i) over = fibres[i]->state == ENDED;
      if (over) allow(blocks[b], PROT_NONE);
      blocks[b].ended = over;
      ended &= over;
    }
    if (ended) return;
    if (!moved && !release_cluster() && !release_box()) trouble = "threads wait for one another at different barriers";
  }
}

void on_fault(int, siginfo_t *info, void *) {
  if (!guarding) {
    signal(SIGSEGV, SIG_DFL);
    return;
  }
  snprintf(message, sizeof message, "thread (%u, %u) of block (%u, %u) left its memory at %p",
           threadIdx.x, threadIdx.y, blockIdx.x, blockIdx.y, info->si_addr);
  trouble = message;
  siglongjmp(way_out, 1);
}

}  // namespace

extern "C" {

void gpu_barrier() {
  if (current < 0) trouble = "a kernel said to have no barriers came to one";
  else wait_as(AT_BARRIER);
}

void gpu_cluster_arrive() {
  Fibre *f = fibres[current];
  if (f->waits) trouble = "a thread arrived at a barrier of its cluster twice";
  f->waits = true;
  ++f->arrivals;
}

void gpu_cluster_wait() {
  Fibre *f = fibres[current];
  if (!f->waits) trouble = "a thread waits at a barrier of its cluster that it has not arrived at";
  f->waits = false;
  wait_as(AT_CLUSTER);
}

void gpu_open_box(void *box, unsigned bytes) {
  boxes[(unsigned char *)box] = Box{bytes, 0, false, {}};
}

void gpu_wait_for_box(void *box) {
  Fibre *f = fibres[current];
  f->box = (unsigned char *)box;
  const auto found = boxes.find(f->box);
  if (found == boxes.end() || !found->second.full) wait_as(AT_BOX);
}

void gpu_send(void *own, const void *from, int bytes, unsigned rank, void *box) {
  const size_t to = (unsigned char *)own - gpu_shared, in = (unsigned char *)box - gpu_shared;
  if (rank >= (unsigned)n_blocks || to + bytes > shared_bytes || in + 8 > shared_bytes) {
    trouble = "something is sent to a place that no block has";
    return;
  }
  const Block &b = blocks[rank];
  const auto found = boxes.find(b.shared + in);
  if (b.ended || found == boxes.end()) {
    trouble = "something is sent to a box that is not there";
    return;
  }
  Box &its = found->second;
  if ((its.come += bytes) > its.expected) trouble = "more is sent to a box than it was opened for";
  Sent sent = {b.shared + to, {}, (unsigned)bytes};
  memcpy(sent.content, from, bytes);
  if (next_random() % 2) memcpy(sent.to, from, bytes);
  else its.late.push_back(sent);
}

int gpu_lane() { return current & 31; }

void gpu_exchange(void *to, const void *from, int bytes, int lane) {
  if (current < 0) {
    trouble = "a kernel said to have no exchanges came to one";
    return;
  }
  const int self = current;
  memcpy(slots[self], from, bytes);
  wait_as(AT_EXCHANGE);
  memcpy(to, slots[(self & ~31) | (lane & 31)], bytes);
  wait_as(AT_EXCHANGE);
}

void gpu_ask(void *to, const void *from, int bytes) {
  char touched[16];
  memcpy(touched, from, bytes);  // a fault shows where it is asked for
  fibres[current]->copies.back().push_back(Copy{to, from, bytes});
}

void gpu_end_copies() { fibres[current]->copies.emplace_back(); }

void gpu_wait_copies(int n) {
  auto &groups = fibres[current]->copies;
  while ((int)groups.size() - 1 > n) {
    for (const Copy &c : groups.front()) memcpy(c.to, c.from, c.bytes);
    groups.erase(groups.begin());
  }
}

// Memory whose end (or start) lies at a page that may not be touched.
void *gpu_guarded(size_t bytes, int at_end) {
  const size_t page = sysconf(_SC_PAGESIZE), whole = (bytes + page - 1) / page * page;
  char *base = (char *)mmap(0, whole + 2 * page, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  mprotect(base + page, whole, PROT_READ | PROT_WRITE);
  return base + page + (at_end ? whole - (bytes + 15) / 16 * 16 : 0);
}

void gpu_release(void *at, size_t bytes) {
  const size_t page = sysconf(_SC_PAGESIZE), whole = (bytes + page - 1) / page * page;
  munmap((void *)((size_t)at / page * page - page), whole + 2 * page);
}

// Run a kernel; returns null or what went wrong. `plain` kernels have no barriers: no fibres.
// `cluster` blocks reach one another's memory.
const char *gpu_launch(void (*thread)(void **), void **arguments, const unsigned *grid,
                       const unsigned *block, unsigned shared, unsigned seed, int plain,
                       unsigned cluster) {
  entry = thread;
  entry_arguments = arguments;
  gridDim = Place{grid[0], grid[1], grid[2]};
  blockDim = Place{block[0], block[1], block[2]};
  random_state = seed;
  trouble = 0;
  static char *alternate = 0;
  if (!alternate) {
    alternate = (char *)malloc(1 << 16);
    stack_t s;
    memset(&s, 0, sizeof s);
    s.ss_sp = alternate;
    s.ss_size = 1 << 16;
    sigaltstack(&s, 0);
  }
  struct sigaction action, before;
  memset(&action, 0, sizeof action);
  action.sa_sigaction = on_fault;
  action.sa_flags = SA_SIGINFO | SA_ONSTACK;
  sigaction(SIGSEGV, &action, &before);
  if (cluster > MOST || grid[0] % cluster) return "clusters do not cover the grid";
  n_blocks = cluster;
  shared_bytes = shared;
  for (Block &b : blocks) b.shared = (unsigned char *)gpu_guarded(shared, 1);
  guarding = 1;
  if (!sigsetjmp(way_out, 1)) {
    const unsigned n_clusters = grid[0] / cluster * grid[1] * grid[2];
    const unsigned start = seed && n_clusters ? next_random() % n_clusters : 0;
    for (unsigned c = 0; c < n_clusters && !trouble; ++c) {
      for (unsigned b = 0; b < cluster; ++b) {
        const unsigned i = (start + c) % n_clusters * cluster + b;
        blocks[b].place = Place{i % grid[0], i / grid[0] % grid[1], i / (grid[0] * grid[1])};
        blocks[b].begun = blocks[b].ended = false;
        allow(blocks[b], PROT_NONE);
      }
      if (plain) {
        current = -1;
        begin(blocks[0]);
        blockIdx = blocks[0].place;
        gpu_shared = blocks[0].shared;
        for (threadIdx.z = 0; threadIdx.z < block[2]; ++threadIdx.z)
          for (threadIdx.y = 0; threadIdx.y < block[1]; ++threadIdx.y)
            for (threadIdx.x = 0; threadIdx.x < block[0]; ++threadIdx.x) thread(arguments);
      } else {
        run_cluster(seed != 0);
      }
    }
  }
  guarding = 0;
  sigaction(SIGSEGV, &before, 0);
  for (Block &b : blocks) gpu_release(b.shared, shared);
  return trouble;
}
}
