// Hash chains over responses: index.py says what the functions do, reference.py does the same in plain Python.
//
// Tokens lie in pages, which form a ring: the page made longest ago is taken for the next one. A page belongs to one
// response, and begins with the TAIL tokens before it, so that a context never leaves its page. A place is a token's
// number, page * PAGE + position, plus 1; 0 is none. Of each of LENGTHS lengths, `heads` has the newest place of each
// bucket, and a place the one that was the newest before it.
//
// A link lives longer than the place that it leads to. It is still good if the page there was made no later than the
// link: `made` counts pages. From page to page of a response no such question arises, as the later page lives longer;
// nor for heads, which are cleared with their page.

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

enum { LENGTHS = 4, TAIL = 16, PAGE = 32 };
static const int LENGTH[LENGTHS] = {16, 8, 4, 2};
// Places of a bucket that are looked at: keeps a lookup short where one context fills the ring.
enum { VISITED = 512 };

typedef struct {
    uint32_t before[LENGTHS];
    uint32_t made;
} Place;

typedef struct {
    uint64_t prompt;
    uint32_t made, next, used, version;
    int32_t tokens[TAIL + PAGE];
    Place places[PAGE];
} Page;

typedef struct {
    uint64_t prompt;
    uint32_t page, made, version;  // made 0: it has no page yet
    int32_t tail[TAIL];
    uint32_t buckets[LENGTHS];  // of the tail
} Response;

typedef struct {
    Page *pages;
    Response *responses;
    uint32_t *heads[LENGTHS];
    uint32_t count, made, most, mask;
    int64_t tokens;
} Index;

void index_free(Index *x) {
    if (!x) return;
    for (int l = 0; l < LENGTHS; l++) free(x->heads[l]);
    free(x->pages);
    free(x->responses);
    free(x);
}

// count: pages; buckets: a power of two. NULL: there is not as much memory.
Index *index_new(uint32_t count, uint32_t buckets) {
    Index *x = calloc(1, sizeof *x);
    if (!x) return NULL;
    x->count = count;
    x->mask = buckets - 1;
    int whole = (x->pages = calloc(count, sizeof(Page))) != NULL;
    for (int l = 0; l < LENGTHS; l++) whole &= (x->heads[l] = calloc(buckets, sizeof(uint32_t))) != NULL;
    if (whole) return x;
    index_free(x);
    return NULL;
}

int64_t index_tokens(const Index *x) { return x->tokens; }

int64_t index_bytes(const Index *x) {
    return (int64_t)x->count * sizeof(Page) + LENGTHS * sizeof(uint32_t) * ((int64_t)x->mask + 1) +
           (int64_t)x->most * sizeof(Response);
}

// Buckets of the contexts that end before `end`, one for each length.
static void hash(const Index *x, uint64_t prompt, const int32_t *end, uint32_t *buckets) {
    uint64_t mixed = (prompt + 1) * 0x9E3779B97F4A7C15u;
    int read = 0;
    for (int l = LENGTHS - 1; l >= 0; l--) {
        while (read < LENGTH[l]) {
            mixed = (mixed ^ (uint32_t)end[-++read]) * 0xD6E8FEB86659FD93u;
            mixed ^= mixed >> 32;
        }
        buckets[l] = (uint32_t)mixed & x->mask;
    }
}

// -1: there is not as much memory.
int index_begin(Index *x, uint32_t slot, uint64_t prompt, uint32_t version, const int32_t *tail) {
    if (slot >= x->most) {
        uint32_t most = slot * 2 + 64;
        Response *grown = realloc(x->responses, most * sizeof *grown);
        if (!grown) return -1;
        x->responses = grown;
        x->most = most;
    }
    Response *r = x->responses + slot;
    *r = (Response){.prompt = prompt, .version = version};
    memcpy(r->tail, tail, sizeof r->tail);
    hash(x, prompt, r->tail + TAIL, r->buckets);
    return 0;
}

void index_stamp(Index *x, const uint32_t *slots, int n, uint32_t version) {
    for (int i = 0; i < n; i++) x->responses[slots[i]].version = version;
}

static void clear(Index *x, uint32_t page) {
    Page *p = x->pages + page;
    uint32_t buckets[LENGTHS];
    for (uint32_t i = 0; i < p->used; i++) {
        hash(x, p->prompt, p->tokens + TAIL + i + 1, buckets);
        for (int l = 0; l < LENGTHS; l++) {
            uint32_t *head = x->heads[l] + buckets[l];
            if (*head == page * PAGE + i + 1) *head = 0;
        }
    }
    x->tokens -= p->used;
}

static void turn(Index *x, Response *r) {
    uint32_t page = x->made % x->count;
    clear(x, page);
    if (r->made && x->pages[r->page].made == r->made && r->page != page) x->pages[r->page].next = page + 1;
    Page *p = x->pages + page;
    p->prompt = r->prompt;
    p->made = r->made = ++x->made;
    p->next = p->used = 0;
    p->version = r->version;
    memcpy(p->tokens, r->tail, sizeof r->tail);
    r->page = page;
}

static void add(Index *x, Response *r, int32_t token) {
    const Page *now = x->pages + r->page;
    if (!r->made || now->made != r->made || now->used == PAGE || now->version != r->version) turn(x, r);
    Page *p = x->pages + r->page;
    uint32_t at = p->used++;
    p->tokens[TAIL + at] = token;
    memmove(r->tail, r->tail + 1, sizeof r->tail - sizeof *r->tail);
    r->tail[TAIL - 1] = token;
    hash(x, r->prompt, r->tail + TAIL, r->buckets);
    for (int l = 0; l < LENGTHS; l++) {
        uint32_t *head = x->heads[l] + r->buckets[l];
        p->places[at].before[l] = *head;
        *head = r->page * PAGE + at + 1;
    }
    p->places[at].made = x->made;
    x->tokens++;
}

void index_add(Index *x, const uint32_t *slots, const int32_t *counts, int n, const int32_t *tokens) {
    for (int i = 0; i < n; i++)
        for (int32_t j = 0; j < counts[i]; j++) add(x, x->responses + slots[i], *tokens++);
}

// The place of the next token of the same response, or none.
static uint32_t after(const Index *x, uint32_t place) {
    const Page *p = x->pages + (place - 1) / PAGE;
    if ((place - 1) % PAGE + 1 < p->used) return place + 1;
    return p->next ? (p->next - 1) * PAGE + 1 : 0;
}

static int32_t token(const Index *x, uint32_t place) {
    return x->pages[(place - 1) / PAGE].tokens[TAIL + (place - 1) % PAGE];
}

// Has what is read of a place on its way from memory.
static void call(const Index *x, uint32_t place) {
    const Page *p = x->pages + (place - 1) / PAGE;
    uint32_t at = (place - 1) % PAGE;
    __builtin_prefetch(p);
    __builtin_prefetch(p->tokens + TAIL + at);
    __builtin_prefetch(p->places + at);
}

// Places after the newest occurrences of the response's last LENGTH[l] tokens; returns how many.
static int find(const Index *x, const Response *r, int l, int votes, uint32_t *found) {
    int some = 0, length = LENGTH[l];
    uint32_t place = x->heads[l][r->buckets[l]];
    for (int visited = 0; place && some < votes && visited < VISITED; visited++) {
        const Page *p = x->pages + (place - 1) / PAGE;
        uint32_t at = (place - 1) % PAGE, before = p->places[at].before[l];
        if (before) call(x, before);
        if (p->prompt == r->prompt &&
            !memcmp(p->tokens + TAIL + at + 1 - length, r->tail + TAIL - length, length * sizeof(int32_t)) &&
            (found[some] = after(x, place)))
            some++;
        place = before && x->pages[(before - 1) / PAGE].made <= p->places[at].made ? before : 0;
    }
    return some;
}

// The token that most of `live` agree on, the newest of several; those places are moved to the front, and counted.
static int agree(const Index *x, uint32_t *live, int some, int32_t *best) {
    int most = 0, alike = 0;
    int32_t said[64];
    *best = token(x, live[0]);
    for (int i = 0; i < some; i++) {
        said[i] = token(x, live[i]);
        alike += said[i] == *best;
    }
    if (alike == some) return some;
    for (int i = 0; i + most < some; i++) {
        int same = 0;
        for (int j = i; j < some; j++) same += said[j] == said[i];
        if (same > most) most = same, *best = said[i];
    }
    for (int i = 0, kept = 0; i < some; i++)
        if (said[i] == *best) live[kept++] = live[i];
    return most;
}

// Memory is waited for once for all requests, not by each in its turn.
static void call_all(const Index *x, const uint32_t *slots, int n) {
    for (int i = 0; i < n; i++)
        for (int l = 0; l < LENGTHS; l++) __builtin_prefetch(x->heads[l] + x->responses[slots[i]].buckets[l]);
    for (int i = 0; i < n; i++)
        for (int l = 0; l < LENGTHS; l++) {
            uint32_t place = x->heads[l][x->responses[slots[i]].buckets[l]];
            if (place) call(x, place);
        }
}

void index_draft(const Index *x, const uint32_t *slots, int n, int most, int votes, float least, int32_t *tokens,
                 float *chances, int32_t *lengths, int32_t *matched, uint32_t *versions) {
    call_all(x, slots, n);
    for (int i = 0; i < n; i++) {
        const Response *r = x->responses + slots[i];
        uint32_t live[64];
        int some = 0, l = 0, drafted = 0;
        while (l < LENGTHS && !(some = find(x, r, l, votes, live))) l++;
        matched[i] = some ? LENGTH[l] : 0;
        versions[i] = some ? x->pages[(live[0] - 1) / PAGE].version : 0;
        float chance = 1;
        while (some && drafted < most) {
            int32_t best = 0;
            int agreed = agree(x, live, some, &best);
            chance *= (float)agreed / some;
            if (chance < least) break;
            tokens[i * most + drafted] = best;
            chances[i * most + drafted++] = chance;
            some = 0;
            for (int j = 0; j < agreed; j++)
                if ((live[some] = after(x, live[j]))) some++;
        }
        lengths[i] = drafted;
    }
}
