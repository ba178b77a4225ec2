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

#define _DEFAULT_SOURCE
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

enum { LENGTHS = 4, TAIL = 16, PAGE = 32 };
static const int LENGTH[LENGTHS] = {16, 8, 4, 2};
// Places of a bucket that are looked at: keeps a lookup short where one context fills the ring.
enum { VISITED = 512 };
enum { VOTES = 64, DEEPEST = 64 };  // at most
enum { SHARES = 5 };
static const double SHARE[SHARES - 1] = {0.4, 0.6, 0.8, 0.99};
// Of lookups: how many, what was hoped for, what came; the hope's square, and its product with what came.
enum { LOOKS = 5 };
// Of tokens, or requests, that are gone through together: what one reads is on its way while others are seen to.
enum { TOGETHER = 32 };

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
    uint32_t page, made, version, begun;  // made 0: it has no page yet
    int32_t tail[TAIL];
    uint64_t sums[LENGTHS];  // of the tail
    // What is judged: a lookup's tokens, of which the first ones came, and how many the lookup before it hoped for, below
    // 0 where there was none; and what the newest hopes for.
    int32_t right, looked, expected[DEEPEST];
    uint8_t classes[DEEPEST];
    double hoped, newest;
} Response;

typedef struct {
    Page *pages;
    Response *responses;
    uint32_t *heads[LENGTHS];
    uint32_t count, made, cleared, most, mask;  // cleared: pages that had been made when all was forgotten
    uint64_t power[LENGTHS];
    int64_t tokens;
    uint32_t tried[LENGTHS * SHARES], came[LENGTHS * SHARES];
    double looks[LOOKS];  // that were judged
} Index;

void index_free(Index *x) {
    if (!x) return;
    for (int l = 0; l < LENGTHS; l++) free(x->heads[l]);
    free(x->pages);
    free(x->responses);
    free(x);
}

// A context's hash is a polynomial of its tokens, which is rolled from one token to the next (Karp and Rabin, 1987).
static const uint64_t BASE = 0xD6E8FEB86659FD93u, MIX = 0x9E3779B97F4A7C15u;

// BASE to the power of each length.
static void powers(uint64_t *power) {
    uint64_t p = 1;
    for (int l = LENGTHS - 1, n = 0; l >= 0; l--) {
        while (n < LENGTH[l]) p *= BASE, n++;
        power[l] = p;
    }
}

// Zeros, on large pages of memory where there are some: it is read here and there. NULL: there is not as much.
static void *zeros(size_t count, size_t size) {
    char *made = calloc(count, size);
    uintptr_t large = 1 << 21, first = ((uintptr_t)made + large - 1) & -large, end = (uintptr_t)made + count * size;
    if (made && first + large <= end) madvise((void *)first, (end - first) & -large, MADV_HUGEPAGE);  // or it stays as it is
    return made;
}

// count: pages; buckets: a power of two. NULL: there is not as much memory.
Index *index_new(uint32_t count, uint32_t buckets) {
    Index *x = calloc(1, sizeof *x);
    if (!x) return NULL;
    x->count = count;
    x->mask = buckets - 1;
    powers(x->power);
    int whole = (x->pages = zeros(count, sizeof(Page))) != NULL;
    for (int l = 0; l < LENGTHS; l++) {
        whole &= (x->heads[l] = zeros(buckets, sizeof(uint32_t))) != NULL;
        // Written to anywhere, from the first token on: the memory is to be had now, not in the midst of decoding.
        for (size_t i = 0; x->heads[l] && i < buckets; i += 4096 / sizeof(uint32_t)) *(volatile uint32_t *)(x->heads[l] + i) = 0;
    }
    if (whole) return x;
    index_free(x);
    return NULL;
}

void index_clear(Index *x) {
    for (int l = 0; l < LENGTHS; l++) memset(x->heads[l], 0, ((size_t)x->mask + 1) * sizeof(uint32_t));
    if (x->most) memset(x->responses, 0, x->most * sizeof(Response));
    x->cleared = x->made;
    x->tokens = 0;
}

int64_t index_tokens(const Index *x) { return x->tokens; }

int64_t index_bytes(const Index *x) {
    return (int64_t)x->count * sizeof(Page) + LENGTHS * sizeof(uint32_t) * ((int64_t)x->mask + 1) +
           (int64_t)x->most * sizeof(Response);
}

static uint64_t term(int32_t token) { return ((uint32_t)token + 1) * MIX; }

// The sums of the contexts that end before `end`, from nothing.
static void sum_up(const int32_t *end, uint64_t *sums) {
    for (int l = 0; l < LENGTHS; l++) {
        sums[l] = 0;
        for (int i = -LENGTH[l]; i < 0; i++) sums[l] = sums[l] * BASE + term(end[i]);
    }
}

// From those that end before `end` to those that end with it.
static void roll(const Index *x, const int32_t *end, uint64_t *sums) {
    for (int l = 0; l < LENGTHS; l++)
        sums[l] = sums[l] * BASE + term(*end) - term(end[-LENGTH[l]]) * x->power[l];
}

static uint32_t bucket(const Index *x, uint64_t prompt, int l, uint64_t sum) {
    uint64_t mixed = (sum ^ prompt) * MIX;
    return (uint32_t)((mixed ^ mixed >> 29) * (BASE + 2 * l) >> 32) & x->mask;
}

// -1: there is not as much memory.
int index_begin(Index *x, uint32_t slot, uint64_t prompt, uint32_t version, const int32_t *tail) {
    if (slot >= x->most) {
        uint32_t most = slot * 2 + 64;
        Response *grown = realloc(x->responses, most * sizeof *grown);
        if (!grown) return -1;
        memset(grown + x->most, 0, (most - x->most) * sizeof *grown);
        x->responses = grown;
        x->most = most;
    }
    Response *r = x->responses + slot;
    *r = (Response){.prompt = prompt, .version = version, .begun = 1, .newest = -1};
    memcpy(r->tail, tail, sizeof r->tail);
    sum_up(r->tail + TAIL, r->sums);
    return 0;
}

// The first of these that never began, or n.
int index_unknown(const Index *x, const uint32_t *slots, int n) {
    int i = 0;
    while (i < n && slots[i] < x->most && x->responses[slots[i]].begun) i++;
    return i;
}

void index_stamp(Index *x, const uint32_t *slots, int n, uint32_t version) {
    for (int i = 0; i < n; i++) x->responses[slots[i]].version = version;
}

static void clear(Index *x, uint32_t page) {
    Page *p = x->pages + page;
    if (p->made <= x->cleared) return;
    uint32_t *heads[PAGE][LENGTHS];
    uint64_t sums[LENGTHS];
    if (p->used) sum_up(p->tokens + TAIL, sums);
    for (uint32_t i = 0; i < p->used; i++) {
        roll(x, p->tokens + TAIL + i, sums);
        for (int l = 0; l < LENGTHS; l++)
            __builtin_prefetch(heads[i][l] = x->heads[l] + bucket(x, p->prompt, l, sums[l]), 1);
    }
    for (uint32_t i = 0; i < p->used; i++)
        for (int l = 0; l < LENGTHS; l++)
            if (*heads[i][l] == page * PAGE + i + 1) *heads[i][l] = 0;
    x->tokens -= p->used;
}

static void turn(Index *x, Response *r, const int32_t *tail) {
    uint32_t page = x->made % x->count;
    clear(x, page);
    if (r->made && x->pages[r->page].made == r->made && r->page != page) x->pages[r->page].next = page + 1;
    Page *p = x->pages + page;
    p->prompt = r->prompt;
    p->made = r->made = ++x->made;
    p->next = p->used = 0;
    p->version = r->version;
    memcpy(p->tokens, tail, TAIL * sizeof *tail);
    r->page = page;
}

// A token that is to be added, behind the TAIL before it.
typedef struct {
    Response *of;
    int32_t tokens[TAIL + 1];
    uint32_t *heads[LENGTHS];
} Coming;

static void note(Index *x, double hoped, double came) {
    if (hoped < 0) return;
    double looks[LOOKS] = {1, hoped, came, hoped * hoped, hoped * came};
    for (int i = 0; i < LOOKS; i++) x->looks[i] += looks[i];
}

static void judge(Index *x, Response *r, int32_t token) {
    if (r->right == r->looked) return;
    int class = r->classes[r->right], came = r->expected[r->right] == token;
    x->tried[class]++;
    x->came[class] += came;
    if (came && ++r->right < r->looked) return;
    note(x, r->hoped, r->right);
    r->right = r->looked;
}

static void come(Index *x, Coming *c, Response *r, int32_t token) {
    c->of = r;
    memcpy(c->tokens, r->tail, sizeof r->tail);
    c->tokens[TAIL] = token;
    memcpy(r->tail, c->tokens + 1, sizeof r->tail);
    roll(x, c->tokens + TAIL, r->sums);
    for (int l = 0; l < LENGTHS; l++)
        __builtin_prefetch(c->heads[l] = x->heads[l] + bucket(x, r->prompt, l, r->sums[l]), 1);
    judge(x, r, token);
}

static void add(Index *x, const Coming *c) {
    Response *r = c->of;
    const Page *now = x->pages + r->page;
    if (!r->made || now->made != r->made || now->used == PAGE || now->version != r->version) turn(x, r, c->tokens);
    Page *p = x->pages + r->page;
    uint32_t at = p->used++;
    p->tokens[TAIL + at] = c->tokens[TAIL];
    for (int l = 0; l < LENGTHS; l++) {
        p->places[at].before[l] = *c->heads[l];
        *c->heads[l] = r->page * PAGE + at + 1;
    }
    p->places[at].made = x->made;
    x->tokens++;
}

// width: of rows, of which counts[i] tokens are taken; 0: they stand one after another.
void index_add(Index *x, const uint32_t *slots, const int32_t *counts, int n, const int32_t *tokens, int width) {
    Coming coming[TOGETHER];
    int some = 0;
    for (int i = 0; i < n; tokens += width ? width : counts[i], i++)
        for (int32_t j = 0; j < counts[i]; j++) {
            come(x, coming + some++, x->responses + slots[i], tokens[j]);
            if (some < TOGETHER) continue;
            for (int k = 0; k < some; k++) add(x, coming + k);
            some = 0;
        }
    for (int k = 0; k < some; k++) add(x, coming + k);
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

// A search for the places after the newest occurrences of a response's last LENGTH[l] tokens, the longest first. `place`
// is the next one to look at, if its page was made no later than `made`.
typedef struct {
    const Response *of;
    int l, some, visited;
    uint32_t place, made, found[VOTES];
    const uint32_t *heads[LENGTHS];
} Search;

static void start(const Index *x, Search *s, int l) {
    s->l = l;
    s->visited = 0;
    s->made = x->made;
    if (l < LENGTHS && (s->place = *s->heads[l])) call(x, s->place);
}

// One place further; returns whether it goes on.
static int go_on(const Index *x, Search *s, int votes) {
    const Page *p = x->pages + (s->place - 1) / PAGE;
    uint32_t at = (s->place - 1) % PAGE, before = 0;
    int length = LENGTH[s->l];
    if (s->place && p->made <= s->made) {
        const Response *r = s->of;
        if (p->prompt == r->prompt &&
            !memcmp(p->tokens + TAIL + at + 1 - length, r->tail + TAIL - length, length * sizeof(int32_t)) &&
            (s->found[s->some] = after(x, s->place)))
            s->some++;
        before = p->places[at].before[s->l];
        s->made = p->places[at].made;
    }
    if ((s->place = before) && s->some < votes && ++s->visited < VISITED) {
        call(x, before);
        return 1;
    }
    if (s->some) return 0;
    start(x, s, s->l + 1);
    return s->l < LENGTHS;
}

static void search(const Index *x, Search *searches, const uint32_t *slots, int n, int votes) {
    for (int i = 0; i < n; i++) {
        Search *s = searches + i;
        const Response *r = s->of = x->responses + slots[i];
        s->some = 0;
        for (int l = 0; l < LENGTHS; l++)
            __builtin_prefetch(s->heads[l] = x->heads[l] + bucket(x, r->prompt, l, r->sums[l]));
    }
    Search *going[TOGETHER];
    int some = n;
    for (int i = 0; i < n; i++) start(x, going[i] = searches + i, 0);
    while (some) {
        int left = 0;
        for (int i = 0; i < some; i++)
            if (go_on(x, going[i], votes)) going[left++] = going[i];
        some = left;
    }
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

// What the places that were found vote for: tokens, and which share of votes each had of those that were left; until
// the product of these is below `least`. Returns how many.
static int vote(const Index *x, Search *s, int most, float least, int32_t *tokens, float *shares) {
    int some = s->some, drafted = 0;
    float chance = 1;
    while (some && drafted < most) {
        int32_t best = 0;
        int agreed = agree(x, s->found, some, &best);
        float share = (float)agreed / some;
        chance *= share;
        if (chance < least) break;
        tokens[drafted] = best;
        shares[drafted++] = share;
        some = 0;
        for (int j = 0; j < agreed; j++)
            if ((s->found[some] = after(x, s->found[j]))) some++;
    }
    return drafted;
}

static int class_of(int matched, float share) {
    int m = 0, s = 0;
    while (m < LENGTHS - 1 && matched >= LENGTH[LENGTHS - 2 - m]) m++;
    while (s < SHARES - 1 && share >= SHARE[s]) s++;
    return m * SHARES + s;
}

// found[k]: the chance of the first k + 1 tokens that were found, by rates of their classes. What comes is judged by
// them, but while it is by those of an earlier lookup: were these left, of the good ones fewer would be judged. What came
// is held against what was hoped for one lookup ago: a step is chosen some steps before it runs.
static void expect(Index *x, Response *r, const Search *s, int looked, const int32_t *tokens, const float *shares,
                   const double *rates, double *found) {
    double chance = 1, hoped = 0;
    uint8_t classes[DEEPEST];
    for (int k = 0; k < looked; k++) {
        classes[k] = class_of(LENGTH[s->l] + k, shares[k]);
        hoped += found[k] = chance *= rates[classes[k]];
    }
    double before = r->newest;
    r->newest = hoped;
    if (!looked) note(x, before, 0);
    if (!looked || r->right < r->looked) return;
    r->right = 0;
    r->looked = looked;
    r->hoped = before;
    memcpy(r->expected, tokens, looked * sizeof *tokens);
    memcpy(r->classes, classes, looked);
}

// Of what is found, `deepest` tokens at most, the first `most` are drafts. found: of `deepest` each, as `expect` gives
// it; where there are no rates, nothing is judged.
void index_draft(Index *x, const uint32_t *slots, int n, int most, int deepest, int votes, float least,
                 const double *rates, double *found, int32_t *tokens, float *chances, int32_t *lengths,
                 int32_t *matched, uint32_t *versions) {
    Search searches[TOGETHER];
    for (int i = 0; i < n; i++, tokens += most, chances += most, found += deepest) {
        Search *s = searches + i % TOGETHER;
        if (s == searches) search(x, searches, slots + i, n - i < TOGETHER ? n - i : TOGETHER, votes);
        int32_t said[DEEPEST];
        float shares[DEEPEST], chance = 1;
        matched[i] = s->some ? LENGTH[s->l] : 0;
        versions[i] = s->some ? x->pages[(s->found[0] - 1) / PAGE].version : 0;
        int looked = vote(x, s, deepest, least, said, shares);
        if (rates) expect(x, x->responses + slots[i], s, looked, said, shares, rates, found);
        lengths[i] = looked < most ? looked : most;
        for (int k = 0; k < lengths[i]; k++) {
            tokens[k] = said[k];
            chances[k] = chance *= shares[k];
        }
    }
}

// How many tokens of each class were to come, and came, since the last time; and of lookups.
void index_judged(Index *x, uint32_t *tried, uint32_t *came, double *looks) {
    memcpy(looks, x->looks, sizeof x->looks);
    memset(x->looks, 0, sizeof x->looks);
    memcpy(tried, x->tried, sizeof x->tried);
    memcpy(came, x->came, sizeof x->came);
    memset(x->tried, 0, sizeof x->tried);
    memset(x->came, 0, sizeof x->came);
}
