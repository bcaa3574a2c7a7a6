// wgrad_cuda: gradients of the experts' weights, written or accumulated in place, for Hopper. See wgrad_cuda.py.
//
// Warp-specialised: the ten warps of a block have three roles. The load warp draws tiles from a counter and loads
// operands by TMA. Two warp groups of four multiply (wgmma), each one half of a tile. The store warp loads the tile of
// the output that is to be accumulated into while products are under way; the warp groups add their sums to it in
// shared memory, and the store warp writes it back by TMA.
//
// Shapes: N rows, E experts, O and I channels of the weight. A tile is 128 channels O by 256 channels I.
//
// Macros: DEPTH, rows that are multiplied at a time; STAGES, pipeline stages of them; GROUP, tiles along O that are
// neighbours in time; SHARED, bytes of shared memory; ACCUMULATE, whether to add.

typedef unsigned int u32;
typedef unsigned long long u64;

constexpr int ROWS = 128, COLUMNS = 256;
constexpr int MIDDLE = 0x40000000;  // the row at which every expert ends in its TMA map: see ragged.py
constexpr int BOX = 64;  // channels that are contiguous in shared memory
constexpr u32 BOX_BYTES = DEPTH * BOX * 2;
constexpr int GRAD_BOXES = ROWS / BOX, X_BOXES = COLUMNS / BOX;
constexpr u32 STAGE_BYTES = (GRAD_BOXES + X_BOXES) * BOX_BYTES;
constexpr int SLOTS = 8;  // slices of the output tile, sixteen rows each: one per warp that multiplies
constexpr int PART = 32, PARTS = COLUMNS / PART;  // channels of the output per TMA copy
constexpr u32 PART_BYTES = 16 * PART * 4, SLOT_BYTES = PARTS * PART_BYTES;
constexpr int TILE_RING = 4;  // tiles that the load warp may be ahead
static_assert(STAGES * STAGE_BYTES + SLOTS * SLOT_BYTES + 16 * (STAGES + SLOTS + 2 * TILE_RING) == SHARED,
              "as wgrad_cuda.py counts it");
constexpr int IN_FLIGHT = 2;  // stores of slots that may be in flight when the next slot is loaded

struct alignas(64) Map { char opaque[128]; };  // a CUtensorMap

// ------------------------------------------------------------------------------------------------ barriers

__device__ __forceinline__ void init(u32 barrier, u32 count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(count));
}
__device__ __forceinline__ void wait(u32 barrier, u32 parity) {
  asm volatile(
      "{ .reg .pred done;\n"
      "again: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra again; }" ::"r"(barrier), "r"(parity) : "memory");
}
__device__ __forceinline__ void arrive(u32 barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
__device__ __forceinline__ void expect(u32 barrier, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

// ----------------------------------------------------------------------------------------------------- TMA

// Rows of one expert, zeros from its end on (ragged.py). All channels of a tile in one copy, box after box: many small
// copies are slower than a few large ones.
__device__ __forceinline__ void load_operand(const Map *map, u32 to, u32 barrier, int box, int at, int end) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%3, %4, %5, %6, %7}], [%2];" ::"r"(to), "l"(map), "r"(barrier), "r"(0), "r"(at), "r"(box), "r"(end),
      "r"(MIDDLE) : "memory");
}
// The output passes through L2 once: evicted first, it leaves the cache to the operands, which are read many times. Its
// copies are small, because operands queue behind a large one.
__device__ __forceinline__ u64 evict_first() {
  u64 policy;
  asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}
__device__ __forceinline__ void load_output(const Map *map, u32 to, u32 barrier, int column, int row, int expert,
                                            u64 policy) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
      "[%0], [%1, {%3, %4, %4, %5, %6}], [%2], %7;" ::"r"(to), "l"(map), "r"(barrier), "r"(column), "r"(0),
      "r"(row / 8), "r"(expert), "l"(policy) : "memory");
}
__device__ __forceinline__ void store_output(const Map *map, u32 from, int column, int row, int expert, u64 policy) {
  asm volatile(
      "cp.async.bulk.tensor.5d.global.shared::cta.bulk_group.L2::cache_hint [%0, {%2, %3, %3, %4, %5}], [%1], %6;" ::
      "l"(map), "r"(from), "r"(column), "r"(0), "r"(row / 8), "r"(expert), "l"(policy) : "memory");
}

// ------------------------------------------------------------------------------------------------ products

// The wgmma descriptor of boxes: 128-byte swizzle, eight rows are 1024 bytes, boxes one after the other.
__device__ __forceinline__ u64 operand(u32 at) {
  return (u64)((at & 0x3FFFF) >> 4) | (u64)(BOX_BYTES >> 4) << 16 | (u64)(1024 >> 4) << 32 | 1ull << 62;
}
constexpr u64 SIXTEEN_ROWS = 16 * BOX * 2 >> 4;

#define FOUR(i) "+f"(sums[i]), "+f"(sums[i + 1]), "+f"(sums[i + 2]), "+f"(sums[i + 3])
#define SIXTEEN(i) FOUR(i), FOUR(i + 4), FOUR(i + 8), FOUR(i + 12)
#define SIXTY_FOUR(i) SIXTEEN(i), SIXTEEN(i + 16), SIXTEEN(i + 32), SIXTEEN(i + 48)
__device__ __forceinline__ void multiply(float (&sums)[128], u64 grad, u64 x, bool add) {
  asm volatile(
      "{ .reg .pred add; setp.ne.b32 add, %130, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
      "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
      "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, "
      "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, "
      "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, "
      "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, "
      "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127}, "
      "%128, %129, add, 1, 1, 1, 1; }"
      : SIXTY_FOUR(0), SIXTY_FOUR(64)
      : "l"(grad), "l"(x), "r"((int)add));
}

// ---------------------------------------------------------------------------------------------------- work

// `size` is the expert's number of rows, negative where no tile is left.
struct Tile { int expert, row, column, size; };

// Hands out the tiles of all experts, those of experts with most rows first.
struct Scheduler {
  const int *ends, *by_size;
  u64 *taken;  // a counter of tiles: those taken from the front in its upper half, from the back in its lower
  int down, across, tiles;
  bool from_back;

  __device__ __forceinline__ Scheduler(const int *ends, const int *by_size, u64 *taken, int experts, int channels_o,
                                       int channels_i)
      : ends(ends), by_size(by_size), taken(taken), down((channels_o + ROWS - 1) / ROWS),
        across((channels_i + COLUMNS - 1) / COLUMNS) {
    int wanted = experts;
    if (ACCUMULATE) {  // experts without rows come last, and have nothing to add
      wanted = 0;
      for (int first = 0; first < experts; first += 32) {
        const int expert = first + threadIdx.x % 32;
        wanted += __popc(__ballot_sync(~0u, expert < experts && rows_of(expert)));
      }
    }
    tiles = wanted * down * across;
    // Tiles with many rows keep the tensor cores busy, those with few keep memory busy. Half of the blocks take tiles
    // from either end, so that both are busy. Not where experts are alike: there, neighbours share operands in L2.
    const int most = rows_of(by_size[0]), median = rows_of(by_size[wanted / 2]);
    from_back = blockIdx.x % 2 && most > median + median / 4;
  }
  __device__ __forceinline__ int rows_of(int expert) const { return ends[expert] - (expert ? ends[expert - 1] : 0); }

  __device__ __forceinline__ u64 draw() const { return atomicAdd(taken, from_back ? 1ull : 1ull << 32); }
  __device__ __forceinline__ Tile tile(u64 drawn) const {
    const int front = drawn >> 32, back = (int)drawn;
    if (front + back >= tiles) return Tile{0, 0, 0, -1};
    const int number = from_back ? tiles - 1 - back : front, expert = by_size[number / (down * across)];
    const int in_expert = number % (down * across), in_group = in_expert % (GROUP * across);
    const int first = in_expert / (GROUP * across) * GROUP, height = min(down - first, GROUP);
    return Tile{expert, (first + in_group % height) * ROWS, in_group / height * COLUMNS, rows_of(expert)};
  }
};

// The layout of shared memory.
struct Shared {
  u32 stages, sums, ring;
  u32 full, empty;            // barriers of stages: operands loaded, multiplied
  u32 loaded, added;          // barriers of slots: output loaded, sums added
  u32 ring_full, ring_empty;  // barriers of the tile ring: tile published, read by all

  __device__ __forceinline__ explicit Shared(const void *memory) {
    stages = (u32)__cvta_generic_to_shared(memory), sums = stages + STAGES * STAGE_BYTES;
    ring = sums + SLOTS * SLOT_BYTES, full = ring + TILE_RING * sizeof(Tile), empty = full + 8 * STAGES;
    loaded = empty + 8 * STAGES, added = loaded + 8 * SLOTS;
    ring_full = added + 8 * SLOTS, ring_empty = ring_full + 8 * TILE_RING;
  }
  __device__ __forceinline__ void init_barriers() const {
    if (threadIdx.x == 0) {
      for (int i = 0; i < STAGES; i++) init(full + 8 * i, 1), init(empty + 8 * i, 2);
      for (int i = 0; i < SLOTS; i++) init(loaded + 8 * i, 1), init(added + 8 * i, 1);
      for (int i = 0; i < TILE_RING; i++) init(ring_full + 8 * i, 1), init(ring_empty + 8 * i, SLOTS + 1);
      asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();
  }
  __device__ __forceinline__ u32 part(int slot, int part) const { return sums + slot * SLOT_BYTES + part * PART_BYTES; }

  // The load warp publishes its tiles; the eight warps that multiply and the store warp read them.
  __device__ __forceinline__ void publish(int turn, const Tile &tile) const {
    const int place = turn % TILE_RING;
    wait(ring_empty + 8 * place, turn / TILE_RING & 1 ^ 1);
    asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(ring + place * (u32)sizeof(Tile)), "r"(tile.expert),
                 "r"(tile.row), "r"(tile.column), "r"(tile.size) : "memory");
    arrive(ring_full + 8 * place);
  }
  __device__ __forceinline__ Tile tile(int turn, u32 lanes) const {
    const int place = turn % TILE_RING;
    Tile tile;
    wait(ring_full + 8 * place, turn / TILE_RING & 1);
    asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(tile.expert), "=r"(tile.row), "=r"(tile.column), "=r"(tile.size)
                 : "r"(ring + place * (u32)sizeof(Tile)) : "memory");
    __syncwarp(lanes);
    if (threadIdx.x % 32 == 0) arrive(ring_empty + 8 * place);
    return tile;
  }
};

// ------------------------------------------------------------------------------------------------------- roles

__device__ __forceinline__ void load_warp(const Map &grad, const Map &x, const Scheduler &scheduler,
                                          const Shared &shared) {
  int stage = 0, phase = 1;
  Tile tile = scheduler.tile(scheduler.draw());
  for (int turn = 0;; turn++) {
    shared.publish(turn, tile);
    if (tile.size < 0) return;
    const u64 next = scheduler.draw();  // early: the atomic takes as long as several loads
    const int end = scheduler.ends[tile.expert];
    for (int k = 0; k < tile.size; k += DEPTH) {
      const u32 full = shared.full + 8 * stage, to = shared.stages + stage * STAGE_BYTES;
      const int at = MIDDLE - tile.size + k;
      wait(shared.empty + 8 * stage, phase);
      expect(full, STAGE_BYTES);
      load_operand(&grad, to, full, tile.row / BOX, at, end);
      load_operand(&x, to + GRAD_BOXES * BOX_BYTES, full, tile.column / BOX, at, end);
      if (++stage == STAGES) stage = 0, phase ^= 1;
    }
    tile = scheduler.tile(next);
  }
}

__device__ __forceinline__ float2 load_shared(u32 at) {
  float2 v;
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(v.x), "=f"(v.y) : "r"(at) : "memory");
  return v;
}
__device__ __forceinline__ void store_shared(u32 at, float x, float y) {
  asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(at), "f"(x), "f"(y) : "memory");
}

// Where a thread's accumulators are in its warp's slot: wgmma gives it two neighbours of every eight channels, in rows
// r and r + 8. TMA writes eight rows in the order 0, 4, 1, 5, 2, 6, 3, 7, and swizzles the 16-byte pieces of each by its
// place in that order: so the four rows that are accessed at once have no bank conflict.
struct Fragment {
  u32 at[4];  // of eight channels each

  __device__ __forceinline__ explicit Fragment(u32 slot) {
    const int lane = threadIdx.x % 32, row = lane / 4, number = row % 4 * 2 + row / 4;
#pragma unroll
    for (int i = 0; i < 4; i++)
      at[i] = slot + number * PART * 4 + ((i * 2 + lane % 4 / 2 ^ number) << 4) + lane % 2 * 8;
  }
  // Replace the slot by the sums, added to what it held if ACCUMULATE. Loads run ahead to hide their latency.
  __device__ __forceinline__ void add(float (&sums)[128]) const {
    constexpr int PIECES = 32, AHEAD = 4;  // of four sums each
    constexpr u32 BELOW = 8 * PART * 4;
    float2 there[AHEAD][2];
#pragma unroll
    for (int piece = 0; piece < PIECES + AHEAD; piece++) {
      if (const int i = piece - AHEAD; i >= 0) {
        const u32 to = at[i % 4] + i / 4 * PART_BYTES;
        float *mine = sums + i * 4;
        if (ACCUMULATE) {
          const float2 upper = there[i % AHEAD][0], lower = there[i % AHEAD][1];
          mine[0] += upper.x, mine[1] += upper.y, mine[2] += lower.x, mine[3] += lower.y;
        }
        store_shared(to, mine[0], mine[1]), store_shared(to + BELOW, mine[2], mine[3]);
      }
      if (ACCUMULATE && piece < PIECES) {
        const u32 from = at[piece % 4] + piece / 4 * PART_BYTES;
        there[piece % AHEAD][0] = load_shared(from), there[piece % AHEAD][1] = load_shared(from + BELOW);
      }
    }
  }
};

__device__ __forceinline__ void multiply_warps(const Shared &shared) {
  const int half = threadIdx.x / 128, slot = threadIdx.x / 32;
  const bool leader = threadIdx.x % 128 == 0;
  const Fragment fragment(shared.sums + slot * SLOT_BYTES);
  int stage = 0, phase = 0;
  float sums[128];
  for (int turn = 0;; turn++) {
    const int size = shared.tile(turn, ~0u).size;
    if (size < 0) return;
    if (!ACCUMULATE && !size) {
#pragma unroll
      for (int i = 0; i < 128; i++) sums[i] = 0;
    }
    int before = 0;
    for (int k = 0; k < size; k += DEPTH) {
      wait(shared.full + 8 * stage, phase);
      const u32 at = shared.stages + stage * STAGE_BYTES;
      const u64 grad = operand(at + half * BOX_BYTES), x = operand(at + GRAD_BOXES * BOX_BYTES);
      asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
      for (int i = 0; i < DEPTH / 16; i++) multiply(sums, grad + i * SIXTEEN_ROWS, x + i * SIXTEEN_ROWS, k + i > 0);
      asm volatile("wgmma.commit_group.sync.aligned;\nwgmma.wait_group.sync.aligned 1;" ::: "memory");
      if (k && leader) arrive(shared.empty + 8 * before);
      before = stage;
      if (++stage == STAGES) stage = 0, phase ^= 1;
    }
    asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
#pragma unroll
    for (int i = 0; i < 128; i++) asm volatile("" : "+f"(sums[i])::"memory");  // no use may move before the wait
    if (size && leader) arrive(shared.empty + 8 * before);
    wait(shared.loaded + 8 * slot, turn & 1);
    fragment.add(sums);
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    __syncwarp();
    if (threadIdx.x % 32 == 0) arrive(shared.added + 8 * slot);
  }
}

// Load a slot of the output if it is accumulated into; else only say that it is free.
__device__ __forceinline__ void load_slot(const Map &out, const Shared &shared, int slot, const Tile &tile,
                                          u64 policy) {
  const u32 loaded = shared.loaded + 8 * slot;
  if (!ACCUMULATE) return arrive(loaded);
  expect(loaded, SLOT_BYTES);
  for (int part = 0; part < PARTS; part++)
    load_output(&out, shared.part(slot, part), loaded, tile.column + part * PART, tile.row + slot * 16, tile.expert,
                policy);
}

__device__ __forceinline__ void store_warp(const Map &out, const Shared &shared) {
  const u64 policy = evict_first();
  Tile next = shared.tile(0, 1);
  if (next.size >= 0)
    for (int slot = 0; slot < SLOTS; slot++) load_slot(out, shared, slot, next, policy);
  for (int turn = 0; next.size >= 0; turn++) {
    const Tile tile = next;
    next = shared.tile(turn + 1, 1);
    for (int i = 0; i < SLOTS + IN_FLIGHT; i++) {
      const auto slot_of = [](int i) { return i / 2 + i % 2 * (SLOTS / 2); };  // both warp groups in turn
      if (i < SLOTS) {
        const int slot = slot_of(i);
        wait(shared.added + 8 * slot, turn & 1);
        for (int part = 0; part < PARTS; part++)
          store_output(&out, shared.part(slot, part), tile.column + part * PART, tile.row + slot * 16, tile.expert,
                       policy);
      }
      asm volatile("cp.async.bulk.commit_group;\ncp.async.bulk.wait_group.read %0;" ::"n"(IN_FLIGHT) : "memory");
      if (i >= IN_FLIGHT && next.size >= 0) load_slot(out, shared, slot_of(i - IN_FLIGHT), next, policy);
    }
  }
  asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
}

extern "C" __global__ void __launch_bounds__(320, 1)
weight_gradient(const __grid_constant__ Map grad, const __grid_constant__ Map x, const __grid_constant__ Map out,
                const int *ends, const int *by_size, u64 *taken, int experts, int channels_o, int channels_i) {
  extern __shared__ __align__(1024) char memory[];
  const Shared shared(memory);
  shared.init_barriers();
  const int warp = threadIdx.x / 32;
  const bool alone = threadIdx.x % 32 == 0;
  if (warp < SLOTS) {
    multiply_warps(shared);
  } else if (warp == SLOTS) {
    const Scheduler scheduler(ends, by_size, taken, experts, channels_o, channels_i);
    if (alone) load_warp(grad, x, scheduler, shared);
  } else if (alone) {
    store_warp(out, shared);
  }
}
