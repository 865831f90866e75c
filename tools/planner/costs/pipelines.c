/* The loops that take a search longest: of plain 1F1B pipelines the merge of forwards and backwards
 * (megatron_het/schedule/generators/one_f_one_b.py); the time of forwards and backwards in any order (plain.py); the
 * division of layers over stages with the guess at their time (search/candidate_cache.py); and the closed form of
 * schedules/.
 *
 * All do what the Python code does, operation by operation, with the same additions in the same order, so that
 * results are equal to the last bit.  Compile without -ffast-math and without fused multiply-add.
 *
 * Devices are numbered stage by stage.  `runner[stage * microbatches + m]` is the device that runs microbatch m in a
 * stage; the microbatches of device d are `mine[at[d]] ... mine[at[d + 1] - 1]`, ascending.
 */
#include <math.h>
#include <stdint.h>
#include <stdlib.h>

#define UNKNOWN (-1.0)
#define NOBODY (-1)
#define NO_MEMORY (-1)
#define STUCK (-2)

enum { GREEDY = 0, ALTERNATING = 1, BACKWARD_FIRST = 2 };

typedef struct {
    int32_t devices, stages, microbatches;
    const int32_t *stage_of, *runner, *mine, *at;
} Shape;

/* A queue of (time, device), the earliest first and of equal times the lowest device. */
typedef struct {
    double time;
    int32_t device;
} Event;

typedef struct {
    Event *events;
    int64_t count, room;
} Queue;

static int before(Event a, Event b) {
    return a.time < b.time || (a.time == b.time && a.device < b.device);
}

static int push(Queue *queue, double time, int32_t device) {
    if (queue->count == queue->room) {
        int64_t room = 2 * queue->room + 64;
        Event *events = realloc(queue->events, (size_t)room * sizeof(Event));
        if (!events) return 0;
        queue->events = events;
        queue->room = room;
    }
    Event event = {time, device};
    int64_t i = queue->count++;
    while (i && before(event, queue->events[(i - 1) / 2])) {
        queue->events[i] = queue->events[(i - 1) / 2];
        i = (i - 1) / 2;
    }
    queue->events[i] = event;
    return 1;
}

static Event pop(Queue *queue) {
    Event first = queue->events[0], last = queue->events[--queue->count];
    int64_t i = 0, child;
    while ((child = 2 * i + 1) < queue->count) {
        if (child + 1 < queue->count && before(queue->events[child + 1], queue->events[child])) child++;
        if (!before(queue->events[child], last)) break;
        queue->events[i] = queue->events[child];
        i = child;
    }
    queue->events[i] = last;
    return first;
}

typedef struct {
    Shape s;
    const int32_t *limits;
    const double *forward_s, *backward_s;
    int order;
    double *ended_f, *ended_b, *free_at;
    int32_t *at_f, *at_b, *wants_f, *wants_b;
} Merge;

static double forward_at(Merge *g, int32_t d, int32_t m) {
    int32_t stage = g->s.stage_of[d];
    if (!stage) return g->free_at[d];
    double came = g->ended_f[(int64_t)(stage - 1) * g->s.microbatches + m];
    if (came < 0) {
        g->wants_f[d] = m;
        return UNKNOWN;
    }
    return came > g->free_at[d] ? came : g->free_at[d];
}

static double backward_at(Merge *g, int32_t d) {
    if (g->at_b[d] == g->at_f[d]) return UNKNOWN;
    int32_t stage = g->s.stage_of[d];
    if (stage == g->s.stages - 1) return g->free_at[d];
    int32_t m = g->s.mine[g->s.at[d] + g->at_b[d]];
    double came = g->ended_b[(int64_t)(stage + 1) * g->s.microbatches + m];
    if (came < 0) {
        g->wants_b[d] = m;
        return UNKNOWN;
    }
    return came > g->free_at[d] ? came : g->free_at[d];
}

/* When the device runs what next; a negative time if it is to be woken. */
static double choose(Merge *g, int32_t d, int *back) {
    int32_t at_f = g->at_f[d], at_b = g->at_b[d], first = g->s.at[d], count = g->s.at[d + 1] - first;
    int may = at_f < count && at_f - at_b < g->limits[d];
    if (g->order == ALTERNATING) {
        *back = !may;
        return may ? forward_at(g, d, g->s.mine[first + at_f]) : backward_at(g, d);
    }
    double forward = may ? forward_at(g, d, g->s.mine[first + at_f]) : UNKNOWN;
    *back = 0;
    if (at_b == at_f) return forward;
    double backward = backward_at(g, d);
    if (backward < 0) return forward;
    if (forward < 0 || backward < forward || (g->order == BACKWARD_FIRST && backward == forward)) {
        *back = 1;
        return backward;
    }
    return forward;
}

static int merge_loop(Merge *g, Queue *queue, uint8_t *out) {
    int32_t last = g->s.stages - 1;
    int64_t each = g->s.microbatches;
    for (int32_t d = 0; d < g->s.devices; d++)
        if (!push(queue, 0.0, d)) return NO_MEMORY;
    while (queue->count) {
        Event event = pop(queue);
        double now = event.time;
        int32_t d = event.device, m, to, *wants, stage = g->s.stage_of[d];
        int back;
        if (now < g->free_at[d]) continue;
        double time = choose(g, d, &back);
        if (time < 0) continue;
        if (time > now) {
            if (!push(queue, time, d)) return NO_MEMORY;
            continue;
        }
        out[2 * (int64_t)g->s.at[d] + g->at_f[d] + g->at_b[d]] = (uint8_t)back;
        double end;
        if (back) {
            m = g->s.mine[g->s.at[d] + g->at_b[d]++];
            end = now + g->backward_s[d];
            g->ended_b[stage * each + m] = end;
            to = stage - 1;
            wants = g->wants_b;
        } else {
            m = g->s.mine[g->s.at[d] + g->at_f[d]++];
            end = now + g->forward_s[d];
            g->ended_f[stage * each + m] = end;
            to = stage + 1;
            wants = g->wants_f;
        }
        g->free_at[d] = end;
        if (!push(queue, end, d)) return NO_MEMORY;
        if (to < 0 || to > last) continue;
        int32_t other = g->s.runner[to * each + m];
        if (wants[other] == m) {
            wants[other] = NOBODY;
            if (!push(queue, end > g->free_at[other] ? end : g->free_at[other], other)) return NO_MEMORY;
        }
    }
    return 0;
}

/* Order the passes of every device.
 *
 * out: 1 for a backward; those of device d begin at 2 * at[d].
 * done: how many operations of each device could run.
 * Returns 0, or NO_MEMORY.
 */
int het_merge(int32_t devices, int32_t stages, int32_t microbatches, const int32_t *stage_of, const int32_t *runner,
              const int32_t *mine, const int32_t *at, const int32_t *limits, const double *forward_s,
              const double *backward_s, int32_t order, uint8_t *out, int32_t *done) {
    Merge g = {.s = {devices, stages, microbatches, stage_of, runner, mine, at},
               .limits = limits,
               .forward_s = forward_s,
               .backward_s = backward_s,
               .order = order};
    Queue queue = {0};
    size_t table = (size_t)stages * (size_t)microbatches, n = (size_t)devices;
    double *times = malloc((2 * table + n) * sizeof(double));
    int32_t *places = malloc(4 * n * sizeof(int32_t));
    int result = NO_MEMORY;
    if (times && places) {
        g.ended_f = times;
        g.ended_b = times + table;
        g.free_at = times + 2 * table;
        g.at_f = places;
        g.at_b = places + n;
        g.wants_f = places + 2 * n;
        g.wants_b = places + 3 * n;
        for (size_t i = 0; i < 2 * table; i++) times[i] = UNKNOWN;
        for (size_t d = 0; d < n; d++) {
            g.free_at[d] = 0.0;
            g.at_f[d] = g.at_b[d] = 0;
            g.wants_f[d] = g.wants_b[d] = NOBODY;
        }
        result = merge_loop(&g, &queue, out);
        for (size_t d = 0; d < n; d++) done[d] = g.at_f[d] + g.at_b[d];
    }
    free(queue.events);
    free(times);
    free(places);
    return result;
}

/* End of the last operation or message, with what follows it on its device: `_elapsed_s` of plain.py.
 *
 * at: the first operation of every device, and the number of all.
 * waits, sends: by operation, the message that it waits for and the one that it makes, negative for none.
 * link: by operation, the link that its message takes, negative where it stays on the device.
 * card_s: by operation, how long its message fills the device's share of a network.
 * Returns seconds, or NO_MEMORY or STUCK.
 */
double het_elapsed(int32_t devices, const int32_t *at, int64_t messages, int64_t links, const int32_t *waits,
                   const int32_t *sends, const int32_t *link, const double *seconds, const double *wire_s,
                   const double *card_s, const double *latency_s, const double *tail_s) {
    double *times = malloc((size_t)(messages + links + 3 * (int64_t)devices + 1) * sizeof(double)), result = NO_MEMORY;
    int32_t *places = malloc((size_t)(messages + 2 * (int64_t)devices + 1) * sizeof(int32_t));
    if (times && places) {
        double *arrived = times, *busy = times + messages, *now = busy + links, *last = now + devices,
               *sent = last + devices;
        int32_t *waiting = places, *next = places + messages, *ready = next + devices, waking = devices;
        for (int64_t i = 0; i < messages; i++) {
            arrived[i] = UNKNOWN;
            waiting[i] = NOBODY;
        }
        for (int64_t i = 0; i < links; i++) busy[i] = 0.0;
        for (int32_t d = 0; d < devices; d++) {
            now[d] = last[d] = sent[d] = 0.0;
            next[d] = at[d];
            ready[d] = devices - 1 - d;
        }
        while (waking) {
            int32_t d = ready[--waking], i = next[d];
            double time = now[d];
            for (; i < at[d + 1]; i++) {
                if (waits[i] >= 0) {
                    double came = arrived[waits[i]];
                    if (came < 0) {
                        waiting[waits[i]] = d;
                        break;
                    }
                    if (came > time) time = came;
                }
                time += seconds[i];
                if (sends[i] < 0) continue;
                double come = time;
                if (link[i] >= 0) {
                    double *until = busy + link[i];
                    *until = (*until > time ? *until : time) + wire_s[i];
                    come = *until + latency_s[i];
                    if (card_s[i] > 0) {
                        sent[d] = (sent[d] > time ? sent[d] : time) + card_s[i];
                        come = (*until > sent[d] ? *until : sent[d]) + latency_s[i];
                    }
                    if (come > last[d]) last[d] = come;
                }
                arrived[sends[i]] = come;
                if (waiting[sends[i]] >= 0) ready[waking++] = waiting[sends[i]];
            }
            now[d] = time;
            next[d] = i;
        }
        result = 0.0;
        for (int32_t d = 0; d < devices; d++) {
            if (next[d] < at[d + 1]) {
                result = STUCK;
                break;
            }
            double end = (now[d] > last[d] ? now[d] : last[d]) + tail_s[d];
            if (at[d + 1] > at[d] && end > result) result = end;
        }
    }
    free(times);
    free(places);
    return result;
}

#define FIGURES 5
#define MOST_STAGES 256

/* Layers of each stage so that the slowest ends as early as possible: `divide` of search/candidate_cache.py. */
static void divide(int32_t count, const double *stages, const int32_t *caps, int32_t wanted, int32_t *layers) {
    double now[MOST_STAGES], ends = 0.0, rate = 0.0;
    for (int32_t i = 0; i < count; i++) {
        ends += stages[FIGURES * i + 1];
        rate += 1.0 / stages[FIGURES * i];
    }
    double level = (wanted + ends) / rate;
    int32_t missing = wanted;
    for (int32_t i = 0; i < count; i++) {
        int32_t n = (int32_t)(level / stages[FIGURES * i] - stages[FIGURES * i + 1]);
        n = n < 1 ? 1 : n;
        layers[i] = n > caps[i] ? caps[i] : n;
        missing -= layers[i];
    }
    for (int32_t i = 0; i < count; i++) {
        double t = stages[FIGURES * i], end = stages[FIGURES * i + 1];
        if (missing < 0)
            now[i] = layers[i] > 1 ? (layers[i] + end) * t : 0.0;
        else
            now[i] = layers[i] < caps[i] ? (layers[i] + 1 + end) * t : HUGE_VAL;
    }
    for (; missing < 0; missing++) {
        int32_t at = 0;
        for (int32_t i = 1; i < count; i++)
            if (now[i] > now[at]) at = i;
        layers[at]--;
        now[at] = layers[at] > 1 ? now[at] - stages[FIGURES * at] : 0.0;
    }
    for (; missing > 0; missing--) {
        int32_t at = 0;
        for (int32_t i = 1; i < count; i++)
            if (now[i] < now[at]) at = i;
        if (now[at] == HUGE_VAL) return;
        layers[at]++;
        now[at] = layers[at] < caps[at] ? now[at] + stages[FIGURES * at] : HUGE_VAL;
    }
}

/* What the stages take with the layers that suit them best: `stages_s` of search/candidate_cache.py.
 *
 * stages: by stage, seconds of a layer with all microbatches, embedding and head as layers, seconds of a pass through
 * a layer, parameters of embedding and head as layers, seconds of the sum of a layer's gradients.
 * out: the slowest stage, the sum of passes through the others, what follows the last backward.
 * Returns 0 if there are too many stages.
 */
int32_t het_stages(int32_t count, const double *stages, const int32_t *caps, int32_t wanted, double drain,
                   double *out) {
    int32_t layers[MOST_STAGES];
    double busy = 0.0, passes = 0.0, worst_pass = 0.0, tail = 0.0;
    if (count > MOST_STAGES) return 0;
    divide(count, stages, caps, wanted, layers);
    for (int32_t i = 0; i < count; i++) {
        const double *s = stages + FIGURES * i;
        double all = (layers[i] + s[1]) * s[0], pass = (layers[i] + s[1]) * s[2];
        double rest = (layers[i] + s[3]) * s[4] - passes * drain;
        passes += pass;
        if (all > busy) {
            busy = all;
            worst_pass = pass;
        }
        if (rest > tail) tail = rest;
    }
    out[0] = busy;
    out[1] = passes - worst_pass;
    out[2] = tail;
    return 1;
}

/* The closed form of a pipeline (schedules/base.py, schedules/pipelines.py).  A stage in figures: seconds of a forward
 * and of a backward, of all it computes, and its kinds of replicas; of each kind, seconds of a forward and of a
 * backward, microbatches, those in flight, and how many replicas of that kind there are.
 */
enum { FORWARD, BACKWARD, BUSY, KINDS, HEAD, MINE = 2, HELD, COUNT, KIND };

static double larger(double a, double b) { return b > a ? b : a; }

/* Where the figures of every stage begin. */
static int32_t begin(int32_t count, const double *figures, const double **stages) {
    if (count > MOST_STAGES) return 0;
    for (int32_t s = 0; s < count; s++) {
        stages[s] = figures;
        figures += HEAD + KIND * (int32_t)figures[KINDS];
    }
    return 1;
}

static double slowest_pass(const double *stage) {
    const double *kind = stage + HEAD;
    double slowest = kind[FORWARD] + kind[BACKWARD];
    for (int32_t i = 1; i < (int32_t)stage[KINDS]; i++) {
        kind += KIND;
        slowest = larger(slowest, kind[FORWARD] + kind[BACKWARD]);
    }
    return slowest;
}

/* Replicas of a stage, and how many passes they are ahead of their backwards together, or have in all. */
static double sum_of(const double *stage, int32_t figure) {
    const double *kind = stage + HEAD;
    double sum = 0.0;
    for (int32_t i = 0; i < (int32_t)stage[KINDS]; i++, kind += KIND) {
        sum += kind[COUNT] * (figure == COUNT ? 1.0 : kind[figure]);
    }
    return sum;
}

/* `_loops_s`.  Returns 0 if there are too many stages. */
int32_t het_loops(int32_t count, const double *figures, const double *ways, int32_t cut, double *out) {
    const double *stages[MOST_STAGES];
    double both[MOST_STAGES], widths[MOST_STAGES], ahead[MOST_STAGES], total;
    if (!begin(count, figures, stages)) return 0;
    for (int32_t s = 0; s < count; s++) {
        both[s] = (stages[s][FORWARD] + stages[s][BACKWARD]) / cut;
        widths[s] = cut > 1 ? 1.0 : sum_of(stages[s], COUNT);
        ahead[s] = cut > 1 ? 2.0 * (count - s) : sum_of(stages[s], HELD);
    }
    total = cut > 1 ? cut * stages[0][HEAD + MINE] : sum_of(stages[0], MINE);
    for (int32_t s = 0; s < count; s++) {
        double loop = both[s], worst = loop / widths[s];
        for (int32_t e = s + 1; e < count; e++) {
            loop += 2 * ways[e - 1] + both[e];
            worst = larger(worst, loop / (ahead[s] - ahead[e] + widths[e]));
        }
        out[s] = total * worst;
    }
    return 1;
}

/* `_links_s`: of one boundary. */
static double link_of(const double *stage, const double *after, double transfer, double total) {
    double width = sum_of(stage, COUNT), more = sum_of(after, COUNT);
    return total / (more < width ? more : width) * transfer;
}

/* `_stall_s`: how long a stage waits, beyond the compute of its slowest replica. */
static double stall_of(const double *stage, double trip, double slowest, double cut, double link, double chunks,
                       double loop, double arrive, double leave) {
    double stall = 0.0;
    const double *kind = stage + HEAD;
    for (int32_t i = 0; i < (int32_t)stage[KINDS]; i++, kind += KIND) {
        double f = kind[FORWARD] / cut, b = kind[BACKWARD] / cut, k = kind[MINE], held = kind[HELD];
        double ahead = (held - 1) * cut, own = (f + b) * cut * k;
        double idle = larger(0.0, trip - ahead * f) + larger(0.0, trip - ahead * b);
        if (cut > 1) {
            idle = trip + larger(0.0, loop - own);
        } else if (k <= held) {
            idle = larger(0.0, trip + larger(f + k * b, k * f + b) - own);
        } else {
            double late = (idle < trip ? idle : trip) + (k - held) * (loop / k - f - b);
            if (loop / k > f + b) idle = larger(idle, late);
            idle = larger(idle, (k - held) * (f + b + (trip + slowest) / 2) / held + f + b + trip - own);
        }
        if (cut == 1) {
            double come = larger(f, arrive / k), go = larger(b, leave / k), first = held < k ? held : k;
            double pair = larger(f + b, larger(come, go));
            idle = larger(idle, (first - 1) * come + f + (k - first) * pair + first * go - own);
        }
        idle = larger(idle, link * chunks - own);
        stall = larger(stall, own + idle - stage[BUSY]);
    }
    return stall;
}

/* `Schedule.pipeline`.
 *
 * at_once, transfers, cards, loops, waits: as there; transfers come in turn where in_turn is not 0.
 * out: by stage, the earliest end of its last backward; then the end of all.
 * Returns the stage that decides it, negative if there are too many.
 */
int32_t het_pipeline(int32_t count, const double *figures, const double *at_once, const double *transfers,
                     const double *cards, const double *loops, double waits, double slices, double chunks,
                     int32_t in_turn, double *out) {
    const double *stages[MOST_STAGES];
    double trips[MOST_STAGES], slowest[MOST_STAGES], cut = chunks * slices, sooner = 0.0, drain = 0.0, worst = 0.0;
    double longest = at_once[0];
    double total, there = 0.0, back = 0.0, before = 0.0, beyond = 0.0;  /* links to the stages before and after */
    int32_t which = 0, last = count - 1;
    if (!begin(count, figures, stages)) return -1;
    total = sum_of(stages[0], MINE);
    for (int32_t s = 1; s < count; s++) longest = larger(longest, at_once[s]);
    trips[last] = slowest[last] = 0.0;
    for (int32_t s = last - 1; s >= 0; s--) {
        const double *next = stages[s + 1], way = transfers[s] / slices;
        trips[s] = trips[s + 1] + (next[FORWARD] + next[BACKWARD] - at_once[s + 1]) / cut + 2 * way;
        slowest[s] = slowest[s + 1] + (slowest_pass(next) - at_once[s + 1]) / cut + 2 * way;
    }
    for (int32_t s = 0; s < count; s++) {
        const double *stage = stages[s], way = s < last ? transfers[s] / slices : 0.0;
        double stall = trips[s] - (s ? 2 * (transfers[s - 1] / slices) : 0.0), width = sum_of(stage, COUNT);
        beyond = s < last ? link_of(stage, stages[s + 1], transfers[s], total) : 0.0;
        if (!in_turn) {
            double met = longest - at_once[s], sends = total / width * cards[s];
            stall = stall_of(stage, trips[s] + met, slowest[s] + met, cut, larger(sends, larger(before, beyond)), chunks,
                             larger(loops[s], sends * chunks), there, back);
            stall += waits;
        }
        double end = sooner + stage[BUSY] + stall;
        out[s] = end - drain;
        drain += stage[BACKWARD] / cut + way;
        if (end > worst) {
            worst = end;
            which = s;
        }
        sooner += (stage[FORWARD] + stage[BACKWARD] - at_once[s]) / cut + 2 * way;
        there = larger(larger(there, total * stage[FORWARD] / width), beyond);
        back = larger(larger(back, total * stage[BACKWARD] / width), beyond);
        before = beyond;
    }
    out[count] = worst;
    return which;
}

/* `OneFOneB.ends`: when each stage ends its last backward, none before `earliest`.  Returns 0 if there are too many. */
int32_t het_ends(int32_t count, const double *figures, const double *transfers, double end, const double *earliest,
                 double *out) {
    const double *stages[MOST_STAGES];
    double sooner = 0.0, ahead = 0.0;
    if (!begin(count, figures, stages)) return 0;
    out[0] = end;
    for (int32_t s = 1; s < count; s++) {
        const double *kind = stages[s - 1] + HEAD;
        double left = HUGE_VAL;
        for (int32_t i = 0; i < (int32_t)stages[s - 1][KINDS]; i++, kind += KIND) {
            double held = (kind[HELD] < kind[MINE] ? kind[HELD] : kind[MINE]) * kind[BACKWARD];
            left = held < left ? held : left;
        }
        sooner += stages[s - 1][BACKWARD] + transfers[s - 1];
        ahead = larger(sooner, ahead + (left - slowest_pass(stages[s]) - 2 * transfers[s - 1]));
        out[s] = larger(end - ahead, earliest[s]);
    }
    return 1;
}
