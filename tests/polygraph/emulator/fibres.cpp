// Runs the threads of a block as fibres, one block at a time, in an order that shows missing barriers.
//
// A barrier lets a block on when all its threads that have not ended wait there; an exchange between
// lanes lets a warp on likewise. With a seed, one warp is run for as long as it can, and left for
// another now and then: a thread that reads what another warp has yet to write then reads poison.
#include "gpu.h"
#include <csetjmp>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <sys/mman.h>
#include <ucontext.h>
#include <unistd.h>
#include <vector>

extern "C" {
Place threadIdx, blockIdx, blockDim, gridDim;
unsigned char *gpu_shared;
}

namespace {

enum State { RUNNING, AT_BARRIER, AT_EXCHANGE, ENDED };
const int STACK = 64 << 10;

struct Copy {
  void *to;
  const void *from;
  int bytes;
};

struct Fibre {
  ucontext_t context;
  char *stack;
  Place place;
  State state;
  std::vector<std::vector<Copy>> copies;  // groups; the last one is open
};

std::vector<Fibre *> fibres;
ucontext_t scheduler;
int current = -1, n_threads;
void (*entry)(void **);
void **entry_arguments;
const char *trouble;
sigjmp_buf way_out;
volatile sig_atomic_t guarding;
char message[200];
uint64_t slots[1024][2];
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
  f->place = Place{i % blockDim.x, i / blockDim.x % blockDim.y, i / (blockDim.x * blockDim.y)};
  f->state = RUNNING;
  f->copies.assign(1, {});
  getcontext(&f->context);
  f->context.uc_stack.ss_sp = f->stack;
  f->context.uc_stack.ss_size = STACK;
  f->context.uc_link = &scheduler;
  makecontext(&f->context, run_entry, 0);
}

bool can_run(int warp) {
  for (int i = 32 * warp; i < 32 * warp + 32 && i < n_threads; ++i)
    if (fibres[i]->state == RUNNING) return true;
  return false;
}

// Run each thread of `warp` until it waits or ends.
void run_warp(int warp) {
  for (int i = 32 * warp; i < 32 * warp + 32 && i < n_threads; ++i) {
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

void run_block(bool sticky) {
  n_threads = blockDim.x * blockDim.y * blockDim.z;
  const int n_warps = (n_threads + 31) / 32;
  for (int i = 0; i < n_threads; ++i) prepare(i);
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
    bool moved = !ready.empty();
    for (int w = 0; w < n_warps; ++w) {
      const int end = 32 * w + 32 < n_threads ? 32 * w + 32 : n_threads;
      moved |= release(32 * w, end, AT_EXCHANGE);
    }
    moved |= release(0, n_threads, AT_BARRIER);
    bool ended = true;
    for (int i = 0; i < n_threads; ++i) ended &= fibres[i]->state == ENDED;
    if (ended) return;
    if (!moved) trouble = "threads wait for one another at different barriers";
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
const char *gpu_launch(void (*thread)(void **), void **arguments, const unsigned *grid,
                       const unsigned *block, unsigned shared, unsigned seed, int plain) {
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
  unsigned char *const shared_memory = (unsigned char *)gpu_guarded(shared, 1);
  guarding = 1;
  if (!sigsetjmp(way_out, 1)) {
    const unsigned n_blocks = grid[0] * grid[1] * grid[2];
    const unsigned start = seed && n_blocks ? next_random() % n_blocks : 0;
    for (unsigned b = 0; b < n_blocks && !trouble; ++b) {
      const unsigned i = (start + b) % n_blocks;
      blockIdx = Place{i % grid[0], i / grid[0] % grid[1], i / (grid[0] * grid[1])};
      gpu_shared = shared_memory;
      memset(shared_memory, 0xff, (shared + 15) / 16 * 16);
      if (plain) {
        current = -1;
        for (threadIdx.z = 0; threadIdx.z < block[2]; ++threadIdx.z)
          for (threadIdx.y = 0; threadIdx.y < block[1]; ++threadIdx.y)
            for (threadIdx.x = 0; threadIdx.x < block[0]; ++threadIdx.x) thread(arguments);
      } else {
        run_block(seed != 0);
      }
    }
  }
  guarding = 0;
  sigaction(SIGSEGV, &before, 0);
  gpu_release(shared_memory, shared);
  return trouble;
}
}
