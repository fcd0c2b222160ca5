/* A plain annealer on the true objective, for comparison only: one state, a device in each (stage, pipeline), Metropolis' rule, geometric
 * cooling over the given CPU time. Two devices change places, two pipelines exchange their devices from one stage on, or the order of some
 * stages is reversed.
 *
 * usage: annealer SEED SECONDS < problem
 * problem: K P, then link times of activations, then twice those of a gradient's share, each N x N [s], N = K * P
 * Prints the best cost and the number of moves, then K rows of P devices.
 */
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { MAX = 1024 };
static const double HOT = 0.008, COLD = 1e-4; /* first and last temperature, over the first cost */

static int K, P, N;
static double *link_s, *exchange_s;
static int at[MAX];                    /* stage * P + pipeline -> device */
static double sums[MAX];               /* the same -> what that device exchanges with its stage */
static double group[MAX], hop[MAX];    /* by stage; hop[k] is from k to k + 1 */
static uint64_t state;

static uint64_t draw(void) { /* splitmix64 */
  uint64_t x = state += 0x9e3779b97f4a7c15ULL;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ULL;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebULL;
  return x ^ (x >> 31);
}
static double uniform(void) { return (double)(draw() >> 11) * 0x1.0p-53; }
static int below(int n) { return (int)(((draw() >> 32) * (uint64_t)n) >> 32); }
static double cpu_s(void) { return (double)clock() / CLOCKS_PER_SEC; }

static double between(int k, int l) { /* the slowest link of the pipelines, if stages k and l are neighbours */
  double most = 0;
  for (int i = 0; i < P; i++) most = fmax(most, link_s[at[k * P + i] * N + at[l * P + i]]);
  return most;
}

static double total(void) {
  double most = 0, hops = 0;
  for (int k = 0; k < K; k++) most = fmax(most, group[k]);
  for (int k = 0; k + 1 < K; k++) hops += hop[k];
  return most + 2 * hops;
}

static void refresh(void) {
  for (int k = 0; k < K; k++) {
    group[k] = 0;
    for (int i = 0; i < P; i++) {
      double sum = 0;
      for (int j = 0; j < P; j++) sum += exchange_s[at[k * P + i] * N + at[k * P + j]];
      group[k] = fmax(group[k], sums[k * P + i] = sum);
    }
    if (k) hop[k - 1] = between(k - 1, k);
  }
}

static double replaced(int place, int joins, double *out) { /* a stage's cost once ``joins`` is at ``place``; sums into out */
  int first = place / P * P, leaves = at[place];
  double most = 0, own = 0;
  for (int p = first; p < first + P; p++) {
    if (p == place) continue;
    double *row = exchange_s + at[p] * N;
    own += row[joins];
    most = fmax(most, out[p - first] = sums[p] - row[leaves] + row[joins]);
  }
  out[place - first] = own;
  return fmax(most, own);
}

static void swap_devices(double *cost, double t) {
  static double next[2][MAX];
  int a = below(N), b = below(N), k = a / P, l = b / P, x = at[a], y = at[b], stages[4] = {k - 1, k, l - 1, l};
  if (a == b) return;
  double groups[2] = {group[k], group[l]}, hops[4];
  if (k != l) {
    double here = replaced(a, y, next[0]), there = replaced(b, x, next[1]);
    group[k] = here, group[l] = there;
  }
  at[a] = y, at[b] = x;
  for (int e = 0; e < 4; e++) hops[e] = stages[e] >= 0 && stages[e] < K - 1 ? hop[stages[e]] : 0;
  for (int e = 0; e < 4; e++) if (stages[e] >= 0 && stages[e] < K - 1) hop[stages[e]] = between(stages[e], stages[e] + 1);
  double now = total();
  if (now <= *cost || uniform() < exp((*cost - now) / t)) {
    *cost = now;
    if (k != l) {
      memcpy(sums + k * P, next[0], sizeof(double) * P);
      memcpy(sums + l * P, next[1], sizeof(double) * P);
    } else {
      double sum = sums[a];
      sums[a] = sums[b], sums[b] = sum;
    }
    return;
  }
  at[a] = x, at[b] = y, group[k] = groups[0], group[l] = groups[1];
  for (int e = 0; e < 4; e++) if (stages[e] >= 0 && stages[e] < K - 1) hop[stages[e]] = hops[e];
}

static void swap_pipelines(double *cost, double t) { /* only the hop to stage k changes */
  int k = 1 + below(K - 1), i = below(P), j = below(P), *row = at + k * P, device = row[i];
  if (i == j) return;
  row[i] = row[j], row[j] = device;
  double now = between(k - 1, k), before = hop[k - 1];
  if (now > before && uniform() >= exp(2 * (before - now) / t)) {
    row[j] = row[i], row[i] = device;
    return;
  }
  *cost += 2 * (now - before), hop[k - 1] = now;
  for (int m = k; m < K; m++) {
    double sum = sums[m * P + i];
    sums[m * P + i] = sums[m * P + j], sums[m * P + j] = sum;
    if (m > k) device = at[m * P + i], at[m * P + i] = at[m * P + j], at[m * P + j] = device;
  }
}

static void reverse(double *cost, double t) {
  int k = below(K), l = below(K);
  if (k == l) return;
  if (k > l) { int m = k; k = l, l = m; }
  double before = (k ? hop[k - 1] : 0) + (l < K - 1 ? hop[l] : 0);
  double now = (k ? between(k - 1, l) : 0) + (l < K - 1 ? between(k, l + 1) : 0);
  if (now > before && uniform() >= exp(2 * (before - now) / t)) return;
  for (; k < l; k++, l--)
    for (int i = 0; i < P; i++) { int device = at[k * P + i]; at[k * P + i] = at[l * P + i], at[l * P + i] = device; }
  refresh();
  *cost = total();
}

int main(int argc, char **argv) {
  if (argc != 3 || scanf("%d %d", &K, &P) != 2 || (N = K * P) > MAX || K < 2) return 2;
  state = strtoull(argv[1], NULL, 10) << 32;
  double *tables = malloc(sizeof(double) * 2 * N * N);
  for (int i = 0; i < 2 * N * N; i++) if (scanf("%lf", tables + i) != 1) return 2;
  link_s = tables, exchange_s = tables + N * N;
  for (int i = 0; i < N; i++) at[i] = i;
  for (int i = N - 1; i > 0; i--) { int j = below(i + 1), device = at[i]; at[i] = at[j], at[j] = device; }
  refresh();
  int best_at[MAX];
  unsigned long long moves = 0;
  double cost = total(), first = cost, best = INFINITY, t = 0, seconds = atof(argv[2]), started = cpu_s();
  for (;; moves++) {
    if (moves % 1024 == 0) {
      double share = (cpu_s() - started) / seconds;
      if (share >= 1) break;
      t = first * HOT * pow(COLD / HOT, share);
      if (moves % (1 << 20) == 0) refresh(), cost = total(); /* rounding errors do not add up */
    }
    double kind = uniform();
    if (kind < 0.7) swap_devices(&cost, t);
    else if (kind < 0.95) swap_pipelines(&cost, t);
    else reverse(&cost, t);
    if (cost < best - 1e-9) best = cost, memcpy(best_at, at, sizeof at);
  }
  memcpy(at, best_at, sizeof at);
  refresh();
  printf("%.9f %llu\n", total(), moves);
  for (int i = 0; i < N; i++) printf("%d%c", at[i], (i + 1) % P ? ' ' : '\n');
}
