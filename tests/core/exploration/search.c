/* Breadth-first search over the joint states of a small job, for tests/core/exploration/native.py.

A state is (head, pair of node 0, pair of node 1, ...), each a small number. What these numbers mean,
and every step of one part, is known in Python (cluster.py). This file only combines them, and asks
Python once for each combination that it has not seen (`ask`). Answers are read from `answer`.

The states lie one after the other in the order of their discovery, each packed into as few bits as
the largest numbers so far need; a hash table holds their places, and eight bits of their hashes, so
that few states must be read to be compared. No state is represented by its hash alone, so the
search is exact. Most of the time goes into reading memory in random order. Therefore large arrays
are on huge pages, and the entries that a step needs are requested before the first one is used. */

#define _GNU_SOURCE
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

typedef uint32_t u32;
typedef uint64_t u64;
typedef unsigned __int128 u128;

#define NONE 0xffffffffu
#define MOST_WORDS 6
#define ANSWER_WORDS 65536
#define MOST_FOUND 1024
#define KINDS 16
#define FIRST_BITS 8

/* What Python is asked for. The comments say what the answer has. */
enum {
    PAIR,    /* (pair): node, link, flags, incarnation, version + 1, event, pair after it,
                epoch of the agent, kind of a quiet order or 0, epoch of the order,
                for each node: epoch of its interest in it, whether it loads from it,
                n, n * (pair, slow), n, n * (kind, pair, crashes). These epochs are one higher. */
    HEAD,    /* (head): flags, epoch + 1, mask of kinds, incarnation of each member,
                n, n * (kind, start of a takeover) */
    TEAM,    /* (node 0, ...): broken, n, n * (index, node, messages, peer or NONE, its node) */
    EVENT,   /* (head, index, event): outcome */
    BEAT,    /* (head, index, node): number of the answer or NONE */
    WAIT,    /* (head, mask of heard nodes, limit): outcome */
    TAKEOVER,/* (head, start): outcome */
    SPENT,   /* (head, kind): head */
    CRASHED, /* (head, number): head */
    CHANGE,  /* (pair, change): pair */
    ANSWERED,/* (pair, order): pair or NONE */
    SENT,    /* (pair, node, messages): pair */
    ON_ALL   /* (pair, 0 cut | 1 takeover): pair */
};
/* outcome: none | broken | ends | normal, head, step + 1, n, n * (index, change) */
enum { O_NONE, O_BROKEN, O_ENDS, O_NORMAL };
/* flags of a pair */
enum { ALIVE = 1, HEARD = 2, CUT = 4, STARTING = 8, BEATS = 16, UP = 32 };
/* flags of a head */
enum { OVER = 1, WAITING = 2, REDUCES = 4, TRIMMED = 8, HALTING = 16 };
/* places in the description of a pair or head; n is the number of nodes */
enum { AGENT_EPOCH = 7, ORDER, ORDER_EPOCH, INTEREST, NEVER = (1 << 30) + 1 };
#define SOLO (INTEREST + 2 * n)
enum { MEMBERS = 3 };
/* kinds of quiet orders */
enum { TRIM = 1, INSTALL, HALT, ECHO };

typedef int (*Ask)(int what, u32 a, u32 b, u32 c, u32 d);

typedef struct { u32 key[5]; u32 value; } Slot;
typedef struct __attribute__((packed)) { u32 number; uint8_t tag; } Entry; /* of the hash table */
typedef struct { Slot *slots; u64 size, used; } Map;

typedef struct {
    Ask ask;
    u32 answer[ANSWER_WORDS];
    u32 nodes, words, least_nodes, duplicate, all_cut, worker_limit;
    u32 *pool;
    u64 pool_used, pool_size;
    u32 *pair_at, *head_at;
    u64 pairs, heads;
    Map memo;
    uint8_t *states; /* `width` bytes each: the numbers of a state, `head_bits` and `pair_bits` wide */
    u32 width, head_bits, pair_bits;
    u32 unpacked[MOST_WORDS];
    u64 *births; /* a bit 0 for each state that was found, a bit 1 before those of the next parent */
    u64 n_births;
    u64 *good; /* a bit for each state */
    Entry *table;
    u64 count, size, table_size;
    u64 next; /* number of the next state to expand */
    u64 transitions, faults[KINDS];
    u64 broken; /* number of the state whose step broke a promise */
    u32 found[MOST_FOUND][MOST_WORDS];
    u32 kinds[MOST_FOUND];
    u32 n_found;
    u64 stuck, first_stuck, goals, rounds;
} Search;

/* ---- memory ---- */

/* Return `bytes` of zeros on huge pages where the system has them. */
static void *take(u64 bytes) {
    void *at = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (at == MAP_FAILED) abort();
    madvise(at, bytes, MADV_HUGEPAGE);
    return at;
}

/* Return the same memory with another size; what is added is zero. */
static void *resize(void *at, u64 before, u64 after) {
    at = mremap(at, before, after, MREMAP_MAYMOVE);
    if (at == MAP_FAILED) abort();
    madvise(at, after, MADV_HUGEPAGE);
    return at;
}

static void give(void *at, u64 bytes) {
    if (at) munmap(at, bytes);
}

static u64 mix(u64 x) {
    x ^= x >> 31; x *= 0x7fb5d329728ea185ull;
    x ^= x >> 27; x *= 0x81dadef4bc2dd44dull;
    return x ^ (x >> 33);
}

static u64 hash_words(const u32 *w, u32 n) {
    u64 h = 0x9e3779b97f4a7c15ull;
    for (u32 i = 0; i < n; i++) h = mix(h ^ w[i]) + 0x9e3779b97f4a7c15ull * (i + 1);
    return h;
}

/* ---- what Python answered before ---- */

static Slot *slot_of(Map *map, const u32 *key) {
    u64 at = hash_words(key, 5) & (map->size - 1);
    while (map->slots[at].value != NONE && memcmp(map->slots[at].key, key, 20))
        at = (at + 1) & (map->size - 1);
    return &map->slots[at];
}

static void grow_map(Map *map) {
    Map old = *map;
    map->size = old.size ? old.size * 2 : 1 << 16;
    map->slots = take(map->size * sizeof(Slot));
    for (u64 i = 0; i < map->size; i++) map->slots[i].value = NONE;
    for (u64 i = 0; i < old.size; i++)
        if (old.slots[i].value != NONE) *slot_of(map, old.slots[i].key) = old.slots[i];
    give(old.slots, old.size * sizeof(Slot));
}

/* Keep the first n words of the answer. Returns their place. */
static u32 keep(Search *s, u32 n) {
    if (s->pool_used + n > s->pool_size) {
        while (s->pool_used + n > s->pool_size) s->pool_size *= 2;
        s->pool = realloc(s->pool, s->pool_size * 4);
    }
    memcpy(s->pool + s->pool_used, s->answer, n * 4ull);
    s->pool_used += n;
    return (u32)(s->pool_used - n);
}

/* Return the place of an answer in the pool; NONE: Python failed. */
static u32 look(Search *s, u32 what, u32 a, u32 b, u32 c, u32 d) {
    u32 key[5] = {what, a, b, c, d};
    Slot *slot = slot_of(&s->memo, key);
    if (slot->value != NONE) return slot->value;
    int n = s->ask(what, a, b, c, d);
    if (n < 0) return NONE;
    u32 at = keep(s, n);
    if (s->memo.used * 10 > s->memo.size * 6) grow_map(&s->memo);
    slot = slot_of(&s->memo, key);
    memcpy(slot->key, key, 20);
    slot->value = at;
    s->memo.used++;
    return at;
}

static u32 described(Search *s, u32 **table, u64 *size, u32 what, u32 number) {
    if (number >= *size) {
        u64 more = *size * 2 > number + 1ull ? *size * 2 : number + 1024ull;
        *table = realloc(*table, more * 4);
        for (u64 i = *size; i < more; i++) (*table)[i] = NONE;
        *size = more;
    }
    if ((*table)[number] == NONE) {
        int n = s->ask(what, number, 0, 0, 0);
        if (n < 0) return NONE;
        (*table)[number] = keep(s, n);
    }
    return (*table)[number];
}

#define TRY(x) do { if ((x) == NONE) return -2; } while (0)

/* ---- steps ---- */

static u32 *emit(Search *s, const u32 *state, u32 kind) {
    u32 *to = s->found[s->n_found];
    if (s->n_found >= MOST_FOUND - 1) abort();
    s->kinds[s->n_found++] = kind;
    memcpy(to, state, s->words * 4);
    return to;
}

/* Change `to` by an outcome. 0: done; -1: a promise is broken; -2: Python failed; 1: nothing. */
static int apply(Search *s, u32 at, u32 *to) {
    u32 *o = s->pool + at;
    if (o[0] == O_NONE) return 1;
    if (o[0] == O_BROKEN) return -1;
    u32 before = s->head_at[to[0]];
    to[0] = o[1];
    if (o[0] == O_ENDS) {
        for (u32 i = 0; i < s->nodes; i++) to[1 + i] = 0;
        return 0;
    }
    u32 step = o[2], n = o[3];
    for (u32 k = 0; k < n; k++) {
        u32 i = s->pool[at + 4 + 2 * k], op = s->pool[at + 5 + 2 * k];
        u32 changed = look(s, CHANGE, to[1 + i], op, 0, 0);
        TRY(changed);
        to[1 + i] = s->pool[changed];
    }
    if (s->pool[before] & REDUCES) {
        u32 head = described(s, &s->head_at, &s->heads, HEAD, to[0]);
        TRY(head);
        for (u32 i = 0; i < s->nodes; i++) {
            u32 pair = described(s, &s->pair_at, &s->pairs, PAIR, to[1 + i]);
            TRY(pair);
            u32 *p = s->pool + pair, *member = s->pool + MEMBERS + i;
            if ((p[2] & UP) && member[before] == p[3] && member[head] != p[3]) return -1;
        }
    }
    if (step) {
        u32 head = described(s, &s->head_at, &s->heads, HEAD, to[0]);
        TRY(head);
        for (u32 i = 0; i < s->nodes; i++) {
            u32 pair = described(s, &s->pair_at, &s->pairs, PAIR, to[1 + i]);
            TRY(pair);
            u32 *p = s->pool + pair;
            if (p[3] == s->pool[head + MEMBERS + i] && p[4] > step) return -1;
        }
    }
    return 0;
}

/* Whether a quiet order may arrive before the steps of another node, which depends on the receiver
in `epoch` (`QuietOrder.allows`). */
static int allows(u32 kind, u32 order, u32 epoch, u32 loads) {
    switch (kind) {
    case TRIM: return epoch >= order && !loads;
    case INSTALL: return epoch == order || epoch == NEVER;
    case HALT: return epoch == NEVER;
    default: return 1;
    }
}

/* Whether the coordinator makes no assignment that concerns the node before its next step
(`Cluster._waits_for`). */
static int waits_for(const u32 *h, u32 i, const u32 *p) {
    u32 kind = p[ORDER], order = p[ORDER_EPOCH], agent = p[AGENT_EPOCH], epoch = h[1];
    if (h[MEMBERS + i] != p[3]) return 0;
    if (kind == ECHO) return 1;
    if (agent == epoch)
        return order == epoch && kind != HALT && (kind != TRIM || (h[0] & TRIMMED));
    return agent < epoch && order <= epoch && (h[0] & HALTING);
}

/* Let all orders arrive for which it makes no difference when they do (`Cluster.settled`). Returns
0, or -2: Python failed. */
static int settle(Search *s, u32 *state) {
    u32 n = s->nodes, head = described(s, &s->head_at, &s->heads, HEAD, state[0]);
    TRY(head);
    if (!(s->pool[head] & REDUCES)) return 0;
    for (u32 i = 0; i < n;) {
        u32 pair[MOST_WORDS], quiet = 1;
        for (u32 j = 0; j < n; j++) {
            pair[j] = described(s, &s->pair_at, &s->pairs, PAIR, state[1 + j]);
            TRY(pair[j]);
        }
        const u32 *h = s->pool + head, *p = s->pool + pair[i];
        quiet = p[ORDER] && waits_for(h, i, p);
        for (u32 j = 0; quiet && j < n; j++) {
            const u32 *other = s->pool + pair[j] + INTEREST + 2 * i;
            if (j != i) quiet = allows(p[ORDER], p[ORDER_EPOCH], other[0], other[1]);
        }
        if (quiet) {
            state[1 + i] = p[SOLO + 1];
            i = 0;
        } else
            i++;
    }
    return 0;
}

/* Find all next states, before quiet orders arrive. Returns their number; -1: a promise is broken;
-2: Python failed. */
static int unsettled(Search *s, const u32 *state, int with_faults) {
    u32 n = s->nodes, head = described(s, &s->head_at, &s->heads, HEAD, state[0]);
    u32 pair[MOST_WORDS], mask = 0, fast = 0, flags = 0, limit;
    int made;
    s->n_found = 0;
    TRY(head);
    if (s->pool[head] & OVER) return 0;
    for (u32 i = 0; i < n; i++) {
        pair[i] = described(s, &s->pair_at, &s->pairs, PAIR, state[1 + i]);
        TRY(pair[i]);
    }
    for (u32 i = 0; i < n; i++) {
        u32 *p = s->pool + pair[i];
        flags |= p[2];
        if (p[5] != NONE) {
            u32 *to = emit(s, state, NONE), after = p[6];
            u32 at = look(s, EVENT, state[0], i, p[5], 0);
            TRY(at);
            to[1 + i] = after;
            if ((made = apply(s, at, to)) < 0) return made;
            fast++;
        }
        p = s->pool + pair[i];
        for (u32 k = 0, m = p[SOLO]; k < m; k++) {
            emit(s, state, NONE)[1 + i] = p[SOLO + 1 + 2 * k];
            fast += !p[SOLO + 2 + 2 * k];
        }
        if ((p[2] & BEATS) && p[3] != s->pool[head + MEMBERS + i]) {
            u32 at = look(s, BEAT, state[0], i, p[0], 0), after;
            TRY(at);
            if (s->pool[at] != NONE) {
                after = look(s, ANSWERED, state[1 + i], s->pool[at], 0, 0);
                TRY(after);
                if (s->pool[after] != NONE) emit(s, state, NONE)[1 + i] = s->pool[after];
            }
        }
        p = s->pool + pair[i];
        if ((p[2] & HEARD) && p[3] == s->pool[head + MEMBERS + i]) mask |= 1u << i;
    }
    {
        u32 nodes[4] = {0, 0, 0, 0};
        for (u32 i = 0; i < n; i++) nodes[i] = s->pool[pair[i]];
        u32 team = look(s, TEAM, nodes[0], nodes[1], nodes[2], nodes[3]);
        TRY(team);
        if (s->pool[team]) return -1;
        for (u32 k = 0, m = s->pool[team + 1]; k < m; k++) {
            u32 t[5], after, *to = emit(s, state, NONE);
            memcpy(t, s->pool + team + 2 + 5 * k, 20);
            after = look(s, SENT, state[1 + t[0]], t[1], t[2], 0);
            TRY(after);
            to[1 + t[0]] = s->pool[after];
            if (t[3] != NONE) {
                after = look(s, SENT, state[1 + t[3]], t[4], 0, 0);
                TRY(after);
                to[1 + t[3]] = s->pool[after];
            }
            fast++;
        }
    }
    if (!fast) {
        u32 *to = emit(s, state, NONE), at;
        limit = flags & STARTING ? 2 : flags & CUT ? 1 : 0;
        at = look(s, WAIT, state[0], mask, limit, 0);
        TRY(at);
        if ((made = apply(s, at, to)) < 0) return made;
        if (made) s->n_found--;
    }
    u32 kinds = s->pool[head + 2];
    if (!with_faults || !kinds) return s->n_found;
    for (u32 i = 0; i < n; i++) {
        u32 *p = s->pool + pair[i], m = p[SOLO], faults = SOLO + 1 + 2 * m;
        for (u32 k = 0, many = p[faults]; k < many; k++) {
            u32 f[3], at, *to;
            memcpy(f, s->pool + pair[i] + faults + 1 + 3 * k, 12);
            if (!(kinds >> f[0] & 1)) continue;
            to = emit(s, state, f[0]);
            to[1 + i] = f[1];
            if (f[2]) {
                at = look(s, CRASHED, state[0], f[2], 0, 0);
                TRY(at);
                to[0] = s->pool[at];
            }
        }
        p = s->pool + pair[i];
        if ((kinds >> s->duplicate & 1) && (p[2] & UP)) {
            u32 *to = emit(s, state, s->duplicate), at = look(s, EVENT, state[0], i, p[5], 0);
            TRY(at);
            if ((made = apply(s, at, to)) < 0) return made;
        }
    }
    if (kinds >> s->all_cut & 1) {
        u32 *to = emit(s, state, s->all_cut);
        for (u32 i = 0; i < n; i++) {
            u32 at = look(s, ON_ALL, state[1 + i], 0, 0, 0);
            TRY(at);
            to[1 + i] = s->pool[at];
        }
    }
    for (u32 k = 0, m = s->pool[head + MEMBERS + n]; k < m; k++) {
        const u32 *start = s->pool + head + MEMBERS + n + 1 + 2 * k;
        u32 kind = start[0], which = start[1];
        u32 *to = emit(s, state, kind), at;
        for (u32 i = 0; i < n; i++) {
            at = look(s, ON_ALL, state[1 + i], 1, 0, 0);
            TRY(at);
            to[1 + i] = s->pool[at];
        }
        at = look(s, TAKEOVER, state[0], which, 0, 0);
        TRY(at);
        if ((made = apply(s, at, to)) < 0) return made;
    }
    for (u32 k = 0; k < s->n_found; k++)
        if (s->kinds[k] != NONE) {
            u32 at = look(s, SPENT, s->found[k][0], s->kinds[k], 0, 0);
            TRY(at);
            s->found[k][0] = s->pool[at];
        }
    return s->n_found;
}

/* Find all next states. Returns the same. */
static int expand(Search *s, const u32 *state, int with_faults) {
    int n = unsettled(s, state, with_faults);
    for (int k = 0; k < n; k++)
        if (settle(s, s->found[k]) < 0) return -2;
    return n;
}

/* ---- the states ---- */

static u128 pack(const Search *s, const u32 *state) {
    u128 x = state[0];
    for (u32 i = 0; i < s->nodes; i++) x = x << s->pair_bits | state[1 + i];
    return x;
}

static void unpack(const Search *s, u128 x, u32 *state) {
    for (u32 i = s->nodes; i-- > 0; x >>= s->pair_bits)
        state[1 + i] = (u32)(x & ((1ull << s->pair_bits) - 1));
    state[0] = (u32)x;
}

/* Bytes for this many states; `load` reads beyond the last one. */
static u64 states_bytes(u64 size, u32 width) { return size * width + sizeof(u128); }

/* The first byte is the lowest one. */
static u128 load(const Search *s, u64 number) {
    u128 x;
    memcpy(&x, s->states + number * s->width, sizeof x);
    return s->width == sizeof x ? x : x & (((u128)1 << 8 * s->width) - 1);
}

static void store(Search *s, u64 number, u128 x) {
    memcpy(s->states + number * s->width, &x, s->width);
}

static void read_state(const Search *s, u64 number, u32 *state) {
    unpack(s, load(s, number), state);
}

static int is_good(const Search *s, u64 i) { return s->good[i >> 6] >> (i & 63) & 1; }
static void set_good(Search *s, u64 i) { s->good[i >> 6] |= 1ull << (i & 63); }

static void give_birth(Search *s, int bit) {
    if (bit) s->births[s->n_births >> 6] |= 1ull << (s->n_births & 63);
    s->n_births++;
}

static void enlarge_bits(u64 **bits, u64 before, u64 after) {
    u64 from = (before + 63) / 64, to = (after + 63) / 64;
    *bits = realloc(*bits, to * 8);
    memset(*bits + from, 0, (to - from) * 8);
}

static u64 hash_state(u128 x) { return mix(mix((u64)x) ^ (u64)(x >> 64)); }

static u64 first_place(const Search *s, u64 hash) {
    return (u64)(((u128)hash * s->table_size) >> 64);
}

/* Return the place of a packed state in the table. */
static u64 place(const Search *s, u128 x, u64 hash) {
    u64 at = first_place(s, hash);
    for (Entry *e = s->table + at; e->number != NONE; e = s->table + at) {
        if (e->tag == (uint8_t)hash && load(s, e->number) == x) break;
        if (++at == s->table_size) at = 0;
    }
    return at;
}

static void enter(Search *s, u64 at, u64 hash, u64 number) {
    s->table[at] = (Entry){(u32)number, (uint8_t)hash};
}

static void fill_table(Search *s) {
    enum { AHEAD = 32 };
    memset(s->table, 0xff, s->table_size * sizeof(Entry));
    for (u64 i = 0; i < s->count; i += AHEAD) {
        u64 hashes[AHEAD], n = s->count - i < AHEAD ? s->count - i : AHEAD;
        for (u64 k = 0; k < n; k++) {
            hashes[k] = hash_state(load(s, i + k));
            __builtin_prefetch(s->table + first_place(s, hashes[k]), 1);
        }
        for (u64 k = 0; k < n; k++) { /* all states differ */
            u64 at = first_place(s, hashes[k]);
            while (s->table[at].number != NONE) at = at + 1 == s->table_size ? 0 : at + 1;
            enter(s, at, hashes[k], i + k);
        }
    }
}

static void grow_table(Search *s) {
    give(s->table, s->table_size * sizeof(Entry));
    s->table_size += s->table_size / 4;
    s->table = take(s->table_size * sizeof(Entry));
    fill_table(s);
}

static int fits(const Search *s, const u32 *state) {
    if (state[0] >> s->head_bits) return 0;
    for (u32 i = 0; i < s->nodes; i++) if (state[1 + i] >> s->pair_bits) return 0;
    return 1;
}

/* Make the packed numbers wider, so that this state fits. */
static void widen(Search *s, const u32 *state) {
    Search before = *s;
    u32 old[MOST_WORDS];
    while (state[0] >> s->head_bits) s->head_bits++;
    for (u32 i = 0; i < s->nodes; i++) while (state[1 + i] >> s->pair_bits) s->pair_bits++;
    u32 bits = s->head_bits + s->nodes * s->pair_bits;
    if (bits > 128) abort();
    s->width = (bits + 7) / 8;
    if (s->width != before.width)
        s->states = resize(
            s->states, states_bytes(s->size, before.width), states_bytes(s->size, s->width));
    before.states = s->states;
    for (u64 i = s->count; i-- > 0;) {
        read_state(&before, i, old);
        store(s, i, pack(s, old));
    }
    fill_table(s);
}

/* ---- the search ---- */

static int is_goal(Search *s, const u32 *state) {
    u32 head = described(s, &s->head_at, &s->heads, HEAD, state[0]), living = 0;
    if (head == NONE) return -2;
    if (s->pool[head] & OVER) return 1;
    for (u32 i = 0; i < s->nodes; i++) {
        u32 pair = described(s, &s->pair_at, &s->pairs, PAIR, state[1 + i]);
        if (pair == NONE) return -2;
        living += s->pool[pair + 2] & ALIVE;
    }
    head = s->head_at[state[0]];
    return !living || (living < s->least_nodes && (s->pool[head] & WAITING));
}

int add(Search *s, const u32 *state) {
    if (!fits(s, state)) widen(s, state);
    u128 x = pack(s, state);
    u64 hash = hash_state(x), at = place(s, x, hash);
    if (s->table[at].number != NONE) return 0;
    if (s->count == s->size) {
        u64 more = s->size + s->size / 2;
        s->states = resize(s->states, states_bytes(s->size, s->width), states_bytes(more, s->width));
        enlarge_bits(&s->good, s->size, more);
        enlarge_bits(&s->births, 2 * s->size, 2 * more);
        s->size = more;
    }
    int goal = is_goal(s, state);
    if (goal < 0) return goal;
    store(s, s->count, x);
    if (goal) set_good(s, s->count);
    give_birth(s, 0);
    enter(s, at, hash, s->count++);
    if (s->count * 8 > s->table_size * 7) grow_table(s);
    return 0;
}

Search *create(Ask ask, u32 nodes, u32 least_nodes, u32 duplicate, u32 all_cut) {
    Search *s = calloc(1, sizeof(Search));
    s->ask = ask; s->nodes = nodes; s->words = nodes + 1; s->least_nodes = least_nodes;
    s->duplicate = duplicate; s->all_cut = all_cut;
    s->pool_size = 1 << 20;
    s->pool = malloc(s->pool_size * 4);
    s->size = s->table_size = 1 << 16;
    s->head_bits = s->pair_bits = FIRST_BITS;
    s->width = (s->head_bits + nodes * s->pair_bits + 7) / 8;
    s->states = take(states_bytes(s->size, s->width));
    s->good = calloc(s->size / 64, 8);
    s->births = calloc(s->size / 32, 8);
    s->table = take(s->table_size * sizeof(Entry));
    fill_table(s);
    grow_map(&s->memo);
    return s;
}

void destroy(Search *s) {
    free(s->pool); free(s->pair_at); free(s->head_at); free(s->births); free(s->good);
    give(s->memo.slots, s->memo.size * sizeof(Slot));
    give(s->states, states_bytes(s->size, s->width));
    give(s->table, s->table_size * sizeof(Entry));
    free(s);
}

/* Request the memory that looking for the found states will read. */
static void request(const Search *s, int n) {
    const Entry *entries[MOST_FOUND];
    uint8_t tags[MOST_FOUND];
    for (int k = 0; k < n; k++) {
        u64 hash = hash_state(pack(s, s->found[k]));
        entries[k] = s->table + first_place(s, hash);
        tags[k] = (uint8_t)hash;
        __builtin_prefetch(entries[k]);
    }
    for (int k = 0; k < n; k++)
        if (entries[k]->number != NONE && entries[k]->tag == tags[k])
            __builtin_prefetch(s->states + (u64)entries[k]->number * s->width);
}

/* Expand at most `most` states. 0: all are expanded; 1: more are left; -1: a promise is broken in
state number `broken`, which was skipped; -2: Python failed. */
int explore(Search *s, u64 most) {
    u32 state[MOST_WORDS];
    for (; most && s->next < s->count; most--, s->next++) {
        read_state(s, s->next, state);
        int n = expand(s, state, 1);
        if (n == -2) return -2;
        give_birth(s, 1);
        if (n == -1) {
            set_good(s, s->next);
            s->broken = s->next++;
            return -1;
        }
        s->transitions += n;
        request(s, n);
        for (int k = 0; k < n; k++) {
            if (s->kinds[k] != NONE) s->faults[s->kinds[k]]++;
            if (add(s, s->found[k]) < 0) return -2;
        }
    }
    return s->next < s->count;
}

/* Return the number of a state; NONE: it was not found. */
static u32 number_of(const Search *s, const u32 *state) {
    if (!fits(s, state)) return NONE;
    u128 x = pack(s, state);
    return s->table[place(s, x, hash_state(x))].number;
}

/* Mark all states from which a goal can be reached without another fault, from the last to the
first, until nothing changes. Returns 0, or -2: Python failed. */
int find_stuck(Search *s) {
    u32 state[MOST_WORDS], *left = NULL;
    u64 open = 0, n_left = 0;
    s->goals = 0;
    for (u64 i = 0; i < s->count; i++) { s->goals += is_good(s, i); open += !is_good(s, i); }
    int first = 1;
    for (;;) {
        u64 total = first ? s->count : n_left, kept = 0, marked = 0;
        u32 *next = NULL;
        if (!first) next = malloc((n_left + 1) * 4);
        for (u64 j = total; j-- > 0;) {
            u64 i = first ? j : left[total - 1 - j];
            if (is_good(s, i)) continue;
            read_state(s, i, state);
            int n = expand(s, state, 0);
            if (n == -2) return -2;
            request(s, n);
            for (int k = 0; k < n && !is_good(s, i); k++) {
                u32 number = number_of(s, s->found[k]);
                if (number == NONE || is_good(s, number)) set_good(s, i);
            }
            if (is_good(s, i)) marked++;
            else if (!first) next[kept++] = (u32)i;
        }
        if (first) {
            n_left = open - marked;
            left = malloc((n_left + 1) * 4);
            for (u64 i = s->count, k = 0; i-- > 0;) if (!is_good(s, i)) left[k++] = (u32)i;
        } else {
            free(left);
            left = next;
            n_left = kept;
        }
        s->rounds++;
        first = 0;
        if (!marked || !n_left) break;
    }
    s->stuck = n_left;
    s->first_stuck = n_left ? left[n_left - 1] : 0;
    free(left);
    return 0;
}

u32 *answer_of(Search *s) { return s->answer; }
u32 *state_of(Search *s, u64 i) { read_state(s, i, s->unpacked); return s->unpacked; }

/* Return the number of the state whose step led to state i first; NONE: it is the start. */
u32 parent_of(Search *s, u64 i) {
    u64 zeros = 0, ones = 0;
    for (u64 at = 0;; at++) {
        if (s->births[at >> 6] >> (at & 63) & 1) ones++;
        else if (zeros++ == i) return (u32)(ones - 1);
    }
}

u64 figure(Search *s, int which) {
    switch (which) {
    case 0: return s->count;
    case 1: return s->transitions;
    case 2: return s->next;
    case 3: return s->broken;
    case 4: return s->stuck;
    case 5: return s->first_stuck;
    case 6: return s->goals;
    case 7: return s->rounds;
    case 8: return s->memo.used;
    case 9: return s->width;
    default: return s->faults[which - 16];
    }
}
