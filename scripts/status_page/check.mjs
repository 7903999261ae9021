// Looks at the status page of a running daemon in a real browser: axe finds nothing, in light and
// dark, on a desktop and a phone; nothing scrolls sideways; nothing is asked of anybody else; no
// errors; Pause pauses; when the daemon does not answer, the page says so, and when it does again,
// that is gone.
//
//   kvstore serve --metrics 127.0.0.1:9405
//   cd scripts/status_page && npm install && node check.mjs http://127.0.0.1:9405/ [DIRECTORY]
//
// With a directory, pictures of the page go there.
import assert from "node:assert/strict";
import {readFileSync} from "node:fs";
import {createRequire} from "node:module";
import chromium from "@sparticuz/chromium";
import puppeteer from "puppeteer-core";

const [url, pictures] = process.argv.slice(2);
if (!url) {
  console.error("usage: node check.mjs URL [DIRECTORY]");
  process.exit(2);
}
const axe = readFileSync(createRequire(import.meta.url).resolve("axe-core/axe.min.js"), "utf8");
const DEADLINE = {timeout: 60_000};
const browser = await puppeteer.launch({
  args: chromium.args, executablePath: await chromium.executablePath(), headless: "shell",
});

// A page with the numbers on it, and what went wrong there.
async function open(scheme, width) {
  const page = await browser.newPage(), wrong = [], elsewhere = [];
  page.on("console", message => wrong.push(message.text()));
  page.on("pageerror", error => wrong.push(String(error)));
  page.on("request", request => {
    if (!request.url().startsWith(url) && !request.url().startsWith("data:")) elsewhere.push(request.url());
  });
  await page.emulateMediaFeatures([{name: "prefers-color-scheme", value: scheme}]);
  await page.setViewport({width, height: 900});
  await page.goto(url);
  await page.waitForFunction(() => document.getElementById("run").textContent.includes("boot"), DEADLINE);
  return {page, wrong, elsewhere};
}

// The debugger's evaluation is not subject to the page's content security policy.
async function violations(page) {
  const session = await page.createCDPSession();
  await session.send("Runtime.evaluate", {expression: axe});
  const {result} = await session.send("Runtime.evaluate", {
    expression: "axe.run().then(r => JSON.stringify(r.violations.map(v => [v.id, v.nodes.map(n => n.html)])))",
    awaitPromise: true, returnByValue: true,
  });
  return JSON.parse(result.value);
}

try {
  for (const scheme of ["light", "dark"]) {
    for (const width of [1280, 360]) {
      const {page, wrong, elsewhere} = await open(scheme, width);
      assert.deepEqual(await violations(page), [], `axe, ${scheme}, ${width}`);
      assert.ok(await page.evaluate(() => document.documentElement.scrollWidth <= innerWidth), "scrolls sideways");
      for (const id of ["tiers", "slow", "misses", "evictions", "prefixes"])
        assert.ok(await page.evaluate(i => document.getElementById(i).rows.length > 0, id), id);
      assert.equal((await page.$$("svg.chart")).length, 3);
      assert.deepEqual(wrong, []);
      assert.deepEqual(elsewhere, []);
      if (pictures) await page.screenshot({path: `${pictures}/page-${scheme}-${width}.png`, fullPage: true});
      await page.close();
    }
  }
  const {page} = await open("light", 1280);
  const trouble = text => page.waitForFunction(
    wanted => document.getElementById("trouble").textContent.startsWith(wanted) && (wanted || !document.getElementById("trouble").textContent), DEADLINE, text);
  await page.setOfflineMode(true);
  await trouble("The daemon does not answer");
  assert.deepEqual(await violations(page), [], "axe, no answer");
  await page.setOfflineMode(false);
  await trouble("");
  await page.focus("#pause");
  await page.keyboard.press("Enter");
  assert.equal(await page.$eval("#pause", b => b.getAttribute("aria-pressed")), "true");
  // No look is on its way now, and none begins, however often one would have been due.
  await page.waitForNetworkIdle({idleTime: 1000, ...DEADLINE});
  let looks = 0;
  page.on("request", () => looks++);
  await new Promise(done => setTimeout(done, 11_000));
  assert.equal(looks, 0, "looks while paused");
  await page.keyboard.press("Enter");
  await page.waitForRequest(request => request.url().includes("status.json"), DEADLINE);
  console.log("the status page is as it should be");
} finally {
  await browser.close();
}
