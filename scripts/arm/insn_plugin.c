/* Counts the instructions that a program executes under qemu-user: exact and repeatable, where no silicon is at hand.
 *
 *     cc -O2 -shared -fPIC -o insn_plugin.so insn_plugin.c        (plugin interface 1: QEMU 4.2 to 8.x; no header needed)
 *     TLE_QEMU_ARGS="-plugin PATH/insn_plugin.so,match=_C.cpython" scripts/arm/run.sh ...
 *
 * match=TEXT  counts only what lies in mapped files whose path contains TEXT: the extension's code, not Python's.
 * Windows     the guest opens one with prctl(0x544c4501) and closes it with prctl(0x544c4502, label); the kernel knows
 *             neither and answers EINVAL. Closing prints "insn window LABEL N" to stderr.
 * blocks=on   closing also prints "insn block LABEL ADDRESS BYTES TIMES" for each piece of straight code whose TIMES in
 *             the window (of one thread) are at least half of those of the busiest: the inner loop.
 * At exit     "insn total N".
 *
 * Threads are summed, each from a counter of its own. A window around code that starts or wakes threads counts their
 * spinning as well: set OMP_WAIT_POLICY=passive, or one thread.
 */
#include <inttypes.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* The part of qemu-plugin.h that is used; Debian does not ship the header. */
typedef uint64_t qemu_plugin_id_t;
struct qemu_plugin_tb;
struct qemu_plugin_insn;
enum qemu_plugin_cb_flags { QEMU_PLUGIN_CB_NO_REGS };
void qemu_plugin_register_vcpu_tb_trans_cb(qemu_plugin_id_t, void (*)(qemu_plugin_id_t, struct qemu_plugin_tb *));
void qemu_plugin_register_vcpu_tb_exec_cb(struct qemu_plugin_tb *, void (*)(unsigned int, void *),
                                          enum qemu_plugin_cb_flags, void *);
void qemu_plugin_register_vcpu_syscall_cb(qemu_plugin_id_t,
                                          void (*)(qemu_plugin_id_t, unsigned int, int64_t, uint64_t, uint64_t,
                                                   uint64_t, uint64_t, uint64_t, uint64_t, uint64_t, uint64_t));
void qemu_plugin_register_vcpu_syscall_ret_cb(qemu_plugin_id_t,
                                              void (*)(qemu_plugin_id_t, unsigned int, int64_t, int64_t));
void qemu_plugin_register_atexit_cb(qemu_plugin_id_t, void (*)(qemu_plugin_id_t, void *), void *);
size_t qemu_plugin_tb_n_insns(const struct qemu_plugin_tb *);
struct qemu_plugin_insn *qemu_plugin_tb_get_insn(const struct qemu_plugin_tb *, size_t);
void *qemu_plugin_insn_haddr(const struct qemu_plugin_insn *);
uint64_t qemu_plugin_tb_vaddr(const struct qemu_plugin_tb *);

#define EXPORT __attribute__((visibility("default")))
EXPORT int qemu_plugin_version = 1;

enum { kPrctl = 167, kMmap = 222, kMprotect = 226 }; /* aarch64 system call numbers */
enum { kWindowOpen = 0x544c4501, kWindowClose = 0x544c4502 };
enum { kProtExec = 4, kThreads = 4096, kRanges = 64 };

static struct {
  uint64_t executed;
  char own_cache_line[56];
} thread[kThreads];
static char maps_code[kThreads]; /* the thread is in a system call that maps executable pages */
static uint64_t window_start;

static struct block {
  uint64_t address, instructions, times;
  struct block *next;
} *blocks; /* every translated one, if they are wanted */
static int blocks_are_wanted;

static char match[256];
static struct {
  uintptr_t low, high;
} range[kRanges];
static int ranges;
static int ranges_are_stale = 1;

static uint64_t executed_so_far(void) {
  uint64_t sum = 0;
  for (int i = 0; i < kThreads; ++i) sum += __atomic_load_n(&thread[i].executed, __ATOMIC_RELAXED);
  return sum;
}

static void read_ranges(void) {
  char line[4096];
  FILE *maps = fopen("/proc/self/maps", "r");
  ranges = 0;
  if (!maps) return;
  while (ranges < kRanges && fgets(line, sizeof line, maps))
    if (strstr(line, match) && sscanf(line, "%" SCNxPTR "-%" SCNxPTR, &range[ranges].low, &range[ranges].high) == 2)
      ++ranges;
  fclose(maps);
}

/* The address is the host's, so the answer does not depend on where qemu put the guest. Blocks are translated one at a
 * time, so there is no race on the ranges. */
static int is_counted(const void *host_address) {
  const uintptr_t address = (uintptr_t)host_address;
  if (!match[0]) return 1;
  if (__atomic_exchange_n(&ranges_are_stale, 0, __ATOMIC_SEQ_CST)) read_ranges();
  for (int i = 0; i < ranges; ++i)
    if (range[i].low <= address && address < range[i].high) return 1;
  return 0;
}

static void on_execute(unsigned int cpu, void *instructions) {
  thread[cpu % kThreads].executed += (uintptr_t)instructions;
}

static void on_execute_block(unsigned int cpu, void *p) {
  struct block *block = p;
  on_execute(cpu, (void *)(uintptr_t)block->instructions);
  ++block->times;
}

static void on_translate(qemu_plugin_id_t id, struct qemu_plugin_tb *block) {
  const size_t n = qemu_plugin_tb_n_insns(block);
  (void)id;
  if (n == 0 || !is_counted(qemu_plugin_insn_haddr(qemu_plugin_tb_get_insn(block, 0)))) return;
  if (blocks_are_wanted) {
    struct block *new_block = calloc(1, sizeof *new_block);
    new_block->address = qemu_plugin_tb_vaddr(block);
    new_block->instructions = n;
    new_block->next = blocks;
    blocks = new_block;
    qemu_plugin_register_vcpu_tb_exec_cb(block, on_execute_block, QEMU_PLUGIN_CB_NO_REGS, new_block);
  } else {
    qemu_plugin_register_vcpu_tb_exec_cb(block, on_execute, QEMU_PLUGIN_CB_NO_REGS, (void *)(uintptr_t)n);
  }
}

static void open_window(void) {
  window_start = executed_so_far();
  for (struct block *block = blocks; block; block = block->next) block->times = 0;
}

static void close_window(uint64_t label) {
  uint64_t most = 0;
  fprintf(stderr, "insn window %" PRIu64 " %" PRIu64 "\n", label, executed_so_far() - window_start);
  for (struct block *block = blocks; block; block = block->next)
    if (block->times > most) most = block->times;
  for (struct block *block = blocks; block; block = block->next)
    if (block->times > 0 && 2 * block->times >= most)
      fprintf(stderr, "insn block %" PRIu64 " 0x%" PRIx64 " %" PRIu64 " %" PRIu64 "\n", label, block->address,
              4 * block->instructions, block->times);
}

static void on_syscall(qemu_plugin_id_t id, unsigned int cpu, int64_t number, uint64_t a, uint64_t b, uint64_t c,
                       uint64_t d, uint64_t e, uint64_t f, uint64_t g, uint64_t h) {
  (void)id, (void)d, (void)e, (void)f, (void)g, (void)h;
  if ((number == kMmap || number == kMprotect) && (c & kProtExec)) maps_code[cpu % kThreads] = 1;
  if (number != kPrctl) return;
  if ((uint32_t)a == kWindowOpen) open_window();
  if ((uint32_t)a == kWindowClose) close_window(b);
}

static void on_syscall_return(qemu_plugin_id_t id, unsigned int cpu, int64_t number, int64_t result) {
  (void)id, (void)number, (void)result;
  if (!maps_code[cpu % kThreads]) return;
  maps_code[cpu % kThreads] = 0;
  __atomic_store_n(&ranges_are_stale, 1, __ATOMIC_SEQ_CST);
}

static void on_guest_exit(qemu_plugin_id_t id, void *unused) {
  (void)id, (void)unused;
  fprintf(stderr, "insn total %" PRIu64 "\n", executed_so_far());
}

EXPORT int qemu_plugin_install(qemu_plugin_id_t id, const void *info, int argc, char **argv) {
  (void)info;
  for (int i = 0; i < argc; ++i) {
    if (strcmp(argv[i], "blocks=on") == 0) {
      blocks_are_wanted = 1;
    } else if (strncmp(argv[i], "match=", 6) == 0) {
      snprintf(match, sizeof match, "%s", argv[i] + 6);
    } else {
      fprintf(stderr, "insn_plugin: unknown option %s\n", argv[i]);
      return -1;
    }
  }
  qemu_plugin_register_vcpu_tb_trans_cb(id, on_translate);
  qemu_plugin_register_vcpu_syscall_cb(id, on_syscall);
  qemu_plugin_register_vcpu_syscall_ret_cb(id, on_syscall_return);
  qemu_plugin_register_atexit_cb(id, on_guest_exit, NULL);
  return 0;
}
