// Draws the dashboard from a running Prometheus, with Grafana's own panel components, into a PNG:
// a look at it without a Grafana server. Says which panels had nothing to show.
//
//   python load.py &                               # a daemon under load, and its Prometheus
//   npm install --ignore-scripts && node draw.mjs http://127.0.0.1:PORT OUT.png [MINUTES]
//
// The components are those of the Grafana that monitoring/docker-compose.yml starts, as npm has
// them; times are UTC.
import {readFileSync} from "node:fs";
import {dirname, join} from "node:path";
import {fileURLToPath} from "node:url";
import chromium from "@sparticuz/chromium";
import {build} from "esbuild";
import puppeteer from "puppeteer-core";

const [prometheus, picture, minutes = "8"] = process.argv.slice(2);
if (!picture) {
  console.error("usage: node draw.mjs PROMETHEUS_URL OUT.png [MINUTES]");
  process.exit(2);
}
const here = dirname(fileURLToPath(import.meta.url)), monitoring = join(here, "../../monitoring");
const dashboard = JSON.parse(readFileSync(join(monitoring, "grafana/dashboards/kvstore.json"), "utf8"));
const WIDTH = 1280, ORIGIN = "http://dashboard.invalid/";
const source = readFileSync(join(monitoring, "grafana/provisioning/datasources/prometheus.yml"), "utf8");
const scrapeMs = 1000 * Number(/timeInterval: (\d+)s/.exec(source)[1]);
const to = Math.floor(Date.now() / 1000) * 1000, from = to - Number(minutes) * 60_000;

async function ask(path, parameters) {
  const answer = await (await fetch(`${prometheus}/api/v1/${path}?${new URLSearchParams(parameters)}`)).json();
  if (answer.status !== "success") throw new Error(`${parameters.query}: ${answer.error}`);
  return answer.data;
}

// As the data source does it: a point per pixel or fewer, at round steps, no closer than scrapes.
const STEPS = [1, 2, 5, 10, 15, 20, 30, 60, 120, 300].map(seconds => 1000 * seconds);
function stepFor(panel) {
  const pixels = WIDTH * panel.gridPos.w / 24;
  return STEPS.find(step => step >= scrapeMs && step >= (to - from) / pixels);
}

async function withSeries(panel) {
  const stepMs = stepFor(panel), series = [];
  const variables = {
    $instance: ".*", $__rate_interval: `${Math.max(stepMs + scrapeMs, 4 * scrapeMs) / 1000}s`,
    $__range: `${(to - from) / 1000}s`,
  };
  for (const target of panel.targets) {
    const query = target.expr.replace(/\$\w+/g, name => variables[name] ?? name);
    const begin = Math.floor(from / stepMs) * stepMs;
    const {result} = await ask("query_range", {query, start: begin / 1000, end: to / 1000, step: stepMs / 1000});
    for (const {metric, values} of result) {
      const known = new Map(values.map(([at, text]) => [Math.round(at * 1000), Number(text)]));
      const times = [];
      for (let at = begin; at <= to; at += stepMs) times.push(at);
      series.push({
        refId: target.refId, labels: metric, times, values: times.map(at => known.get(at) ?? null),
        legend: target.legendFormat.replace(/\{\{(\w+)\}\}/g, (_, label) => metric[label] ?? ""),
      });
    }
  }
  return {...panel, stepMs, series};
}

const panels = await Promise.all(dashboard.panels.map(withSeries));
// Editors and tables are in the components' package, but in no panel. Its modules for `import` lack
// names that they import of each other; those for `require` are whole.
const packages = {
  name: "packages",
  setup(on) {
    on.onResolve({filter: /^@grafana\//}, ({path, kind, resolveDir}) =>
      kind === "import-statement" ? on.resolve(path, {kind: "require-call", resolveDir}) : undefined);
    on.onResolve({filter: /^(@monaco-editor\/react|monaco-editor|react-data-grid)(\/|$)/}, () => ({path: "nothing", namespace: "left-out"}));
    on.onLoad({filter: /.*/, namespace: "left-out"}, () => ({contents: "module.exports = {}"}));
  },
};
const bundle = await build({
  entryPoints: [join(here, "panels.jsx")], bundle: true, write: false, outdir: "bundle", plugins: [packages], format: "iife", minify: true, jsx: "automatic",
  target: "chrome120", loader: {".svg": "dataurl", ".png": "dataurl", ".woff2": "dataurl"}, logLevel: "warning",
  define: {"process.env.NODE_ENV": '"production"', global: "window"},
});
const html = `<!doctype html><style>body {margin: 0}</style><div id="dashboard"></div>`;

// The page, and what the components ask their server for: icons, and Grafana's font. Nothing else.
const icons = join(here, "node_modules/@grafana/ui/dist/public");
const fonts = join(here, "node_modules/@fontsource/inter/files");
const WEIGHTS = {Regular: 400, Medium: 500};
function answer(request) {
  const {protocol, pathname} = new URL(request.url());
  if (protocol === "data:") return request.continue();
  if (request.url() === ORIGIN) return request.respond({contentType: "text/html", body: html});
  const icon = /^\/public\/(?:build\/)?(img\/icons\/[\w/-]+\.svg)$/.exec(pathname);
  const font = /^\/public\/fonts\/inter\/Inter-(\w+)\.woff2$/.exec(pathname);
  try {
    if (icon) return request.respond({contentType: "image/svg+xml", body: readFileSync(join(icons, icon[1]))});
    if (font) {
      const file = `inter-latin-${WEIGHTS[font[1]]}-normal.woff2`;
      return request.respond({contentType: "font/woff2", body: readFileSync(join(fonts, file))});
    }
  } catch { /* said below */ }
  console.error(`not there: ${pathname}`);
  return request.respond({status: 404, body: ""});
}

const browser = await puppeteer.launch({
  args: [...chromium.args, "--lang=en-US"], env: {...process.env, LC_ALL: "en_US.UTF-8"}, executablePath: await chromium.executablePath(), headless: "shell",
});
try {
  const page = await browser.newPage(), wrong = [];
  page.on("pageerror", error => wrong.push(String(error.stack ?? error).slice(0, 1000)));
  page.on("console", message => message.type() === "error" && wrong.push(message.text()));
  await page.setViewport({width: WIDTH, height: 900});
  await page.setRequestInterception(true);
  page.on("request", answer);
  await page.goto(ORIGIN);
  for (const {path, text} of bundle.outputFiles) {
    await (path.endsWith(".css") ? page.addStyleTag({content: text}) : page.addScriptTag({content: text}));
  }
  if (wrong.length) throw new Error(wrong.join("\n"));
  await page.evaluate(drawn => window.drawDashboard(drawn), {panels, from, to, width: WIDTH});
  await page.evaluate(() => document.fonts.ready);
  await page.waitForNetworkIdle({idleTime: 1000, timeout: 60_000});
  const drawn = await page.$("#dashboard > div");
  if (drawn) await drawn.screenshot({path: picture});
  for (const text of new Set(wrong)) console.error(text);
  if (!drawn || wrong.length) process.exitCode = 1;
} finally {
  await browser.close();
}
for (const panel of panels) {
  const shown = panel.series.filter(({values}) => values.some(value => Number.isFinite(value)));
  if (!shown.length) console.log(`nothing to show: ${panel.title}`);
}
